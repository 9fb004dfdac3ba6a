"""Log-probabilities of chosen and likeliest tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.kernels.sampling.logprobs import LOGPROBS, by_topk, logprobs
from tests.kernels.interpreter import needs_interpreter


def fast():  # type: ignore[no-untyped-def]
    return LOGPROBS.version("triton").load()  # type: ignore[union-attr]


@needs_interpreter
@settings(max_examples=8, deadline=None)
@given(
    rows=st.integers(0, 3),
    vocab=st.sampled_from([1, 37, 5003]),
    num_top=st.sampled_from([0, 1, 5, 20]),
    size=st.sampled_from([0.1, 3.0, 1e4]),
)
def test_kernels_agree(rows: int, vocab: int, num_top: int, size: float) -> None:
    generator = torch.Generator().manual_seed(vocab + rows)
    logits = (torch.randn(rows, vocab, generator=generator) * size).to(torch.bfloat16)  # with equals among them
    tokens = torch.randint(vocab, (rows,), generator=generator)
    chosen, values, ids = fast()(logits, tokens, num_top)
    right_chosen, right_values, right_ids = logprobs(logits.double(), tokens, num_top)
    assert torch.equal(ids, right_ids)
    assert torch.allclose(values.double(), right_values, rtol=1e-5, atol=1e-5)
    assert torch.allclose(chosen.double(), right_chosen, rtol=1e-5, atol=1e-5)


@needs_interpreter
@pytest.mark.parametrize("run", [logprobs, by_topk, lambda *args: fast()(*args)], ids=["plain", "topk", "kernels"])
def test_odd_rows(run: object) -> None:
    logits = torch.zeros(3, 50)
    logits[0, 7] = torch.nan
    logits[1, 9:] = -torch.inf
    chosen, values, ids = run(logits, torch.tensor([3, 8, -1]), 2)  # type: ignore[operator]
    assert chosen[0].isnan() and values[0].isnan().all()
    assert torch.allclose(chosen[1], torch.tensor(1 / 9).log()) and (ids[1] < 9).all()
    assert chosen[2].isnan()


@needs_interpreter
def test_tokens_that_lie_apart() -> None:
    logits, tokens = torch.randn(3, 50), torch.tensor([[3, 0], [8, 1], [40, 2]])[:, 0]
    assert torch.allclose(fast()(logits, tokens, 0)[0], logprobs(logits, tokens, 0)[0])


@needs_interpreter
def test_rows_where_many_are_alike() -> None:
    logits = torch.zeros(2, 3000)
    logits[1] = -torch.inf
    logits[1, [2999, 4]] = torch.tensor([1.0, -0.0])
    _, values, ids = fast()(logits, torch.tensor([0, 0]), 3)
    assert ids.tolist() == [[0, 1, 2], [2999, 4, 0]]
    assert torch.allclose(values[0], torch.tensor(1 / 3000).log().expand(3)) and values[1, 2] == -torch.inf


@pytest.mark.gpu
@pytest.mark.parametrize("name", LOGPROBS.cases)
def test_agreement_on_a_gpu(name: str) -> None:
    from armillary.kernels.core.agreement import check, expect

    generator = torch.Generator("cuda").manual_seed(0)
    expected = expect(LOGPROBS, LOGPROBS.inputs(LOGPROBS.small(LOGPROBS.cases[name]), generator), generator)
    found = check(fast(), LOGPROBS, expected)
    assert found.agreed, found.why_not
