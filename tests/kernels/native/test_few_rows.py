"""fp32 weights for a few tokens in C++: the plain linear layer, and each sum the same among others."""

import shutil

import pytest
import torch
import torch.nn.functional as F

from armillary.kernels.core.agreement import relative_error
from armillary.kernels.native.few_rows import FewRows

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")


@pytest.mark.parametrize(("rows", "columns"), [(70, 96), (3, 16), (2048, 48)])
def test_it_is_the_plain_layer(rows: int, columns: int) -> None:
    torch.manual_seed(0)
    plain, bias = torch.randn(rows, columns), torch.randn(rows)
    for given in (bias, None):
        weight = FewRows.of(plain, given)
        assert weight is not None
        for tokens in (0, *range(1, 17), 40):
            x = torch.randn(tokens, columns)
            assert relative_error(weight(x), F.linear(x, plain, given)) < 1e-6
        x = torch.randn(3, 2, columns)
        assert torch.equal(weight(x), F.linear(x, plain, given))


def test_a_token_is_the_same_among_others() -> None:
    weight = FewRows.of(torch.randn(70, 96))
    assert weight is not None
    x = torch.randn(15, 96)
    one_by_one = torch.cat([weight(token[None]) for token in x])
    for tokens in range(1, 16):
        assert torch.equal(weight(x[:tokens]), one_by_one[:tokens])


def test_what_it_does_not_take() -> None:
    assert FewRows.of(torch.zeros(16, 40)) is None, "columns are taken in sixteens"
    assert FewRows.of(torch.zeros(16, 32, dtype=torch.float64)) is None
    assert FewRows.of(torch.zeros(32, 16).T) is None
