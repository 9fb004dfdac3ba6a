"""bf16 weights in C++: the plain linear layer on the same values."""

import shutil

import pytest
import torch
import torch.nn.functional as F

from armillary.kernels.core.agreement import relative_error
from armillary.kernels.native.half_weight import HalfWeight

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")


@pytest.mark.parametrize(("rows", "columns"), [(70, 96), (3, 16), (2048, 48)])
def test_it_is_the_plain_layer(rows: int, columns: int) -> None:
    torch.manual_seed(0)
    plain, bias = torch.randn(rows, columns).bfloat16().float(), torch.randn(rows)
    for given in (bias, None):
        weight = HalfWeight.of(plain, given)
        assert weight is not None
        for tokens in (0, 1, 3, 4, 9, 40):
            x = torch.randn(tokens, columns)
            assert relative_error(weight(x), F.linear(x, plain, given)) < 1e-6


def test_values_that_bf16_does_not_hold_stay_as_they_are() -> None:
    assert HalfWeight.of(torch.full((16, 32), 1.001)) is None
    assert HalfWeight.of(torch.zeros(16, 40)) is None, "columns are taken in sixteens"
