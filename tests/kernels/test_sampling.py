"""Sampling: the same tokens from kernels and plain torch, the distribution that the filters promise, odd rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from armillary.kernels.sampling import SAMPLE, observe, sample, share
from armillary.kernels.sampling_rows import sample as row_by_row
from tests.kernels.interpreter import needs_interpreter


def fast():  # type: ignore[no-untyped-def]
    return SAMPLE.version("triton").load()  # type: ignore[union-attr]


def arguments(logits: Tensor, **given: Any) -> tuple[Tensor, ...]:
    """A row's worth of defaults for each row: temperature 1, no filters, seed 0, step = row."""
    count = logits.shape[0]
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seeds": 0} | given

    def each(name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.as_tensor(values[name], dtype=dtype).expand(count).contiguous()

    seeds, steps = each("seeds", torch.int64), torch.arange(count)
    return logits, each("temperature"), each("top_k", torch.int32), each("top_p"), each("min_p"), seeds, steps


@st.composite
def calls(draw: st.DrawFn) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Rows of every kind in one batch."""
    count, vocab = draw(st.sampled_from([1, 3])), draw(st.sampled_from([2, 33, 700, 5003]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    logits = torch.randn(count, vocab, generator=generator) * draw(st.sampled_from([0.01, 1.0, 20.0]))
    logits = logits.to(draw(st.sampled_from([torch.float32, torch.bfloat16])))

    def each(*options: float) -> Tensor:
        return torch.tensor([draw(st.sampled_from(options)) for _ in range(count)])

    inputs = (logits, each(0.0, 0.3, 1.0, 1.7), each(0, 0, 1, 7, 600).int(), each(1.0, 0.999, 0.9, 0.3, 0.0),
              each(0.0, 0.0, 0.05, 1.0), torch.randint(1 << 62, (count,), generator=generator),
              torch.arange(count) + draw(st.sampled_from([0, 1 << 33])))  # fmt: skip
    extra: dict[str, Tensor] = {}
    if draw(st.booleans()):
        rows = count + 2
        extra = {
            "repetition_B": each(1.0, 1.3, 0.7), "presence_B": each(0.0, 0.5), "frequency_B": each(0.0, 0.2, -0.1),
            "counts_SV": torch.randint(-3, 4, (rows, vocab), generator=generator).clamp_min(0).int(),
            "prompt_SV": torch.rand(rows, vocab, generator=generator) < 0.2,
            "rows_B": torch.randperm(rows, generator=generator)[:count],
        }  # fmt: skip
    if draw(st.booleans()):
        words = -(-vocab // 32)
        extra["allowed_BW"] = torch.randint(-(2**31), 2**31 - 1, (count, words), generator=generator).int()
    return inputs, extra


@needs_interpreter
@settings(max_examples=9, deadline=None)
@given(call=calls())
def test_kernels_draw_the_tokens_of_plain_torch(call: tuple[tuple[Tensor, ...], dict[str, Tensor]]) -> None:
    inputs, extra = call
    assert fast()(*inputs, **extra).tolist() == sample(*inputs, **extra).tolist()


@settings(max_examples=60, deadline=None)
@given(call=calls())
def test_a_row_at_a_time_gives_the_same_tokens(call: tuple[tuple[Tensor, ...], dict[str, Tensor]]) -> None:
    inputs, extra = call
    assert row_by_row(*inputs, **extra).tolist() == sample(*inputs, **extra).tolist()


@needs_interpreter
def test_rows_that_reach_beyond_the_candidates_are_searched_as_a_whole() -> None:
    logits = torch.randn(2, 5000) * 0.01  # flat: top-p 0.9 keeps thousands
    inputs = arguments(logits, top_p=torch.tensor([0.9, 1.0]), top_k=torch.tensor([0, 4000]))
    assert fast()(*inputs).tolist() == sample(*inputs).tolist()


@needs_interpreter
@pytest.mark.parametrize("run", [sample, row_by_row, lambda *args: fast()(*args)], ids=["plain", "rows", "kernels"])
def test_odd_rows(run: Any) -> None:
    logits = torch.zeros(6, 100)
    logits[0, 7] = torch.nan
    logits[1] = -torch.inf
    logits[2, 50] = torch.inf
    logits[3] = -torch.inf
    logits[3, 99] = -3e38
    logits[4, 3] = 3e38
    logits[5, 20:23] = 5.0
    assert run(*arguments(logits, top_k=40, top_p=0.9))[:5].tolist() == [-1, -1, 50, 99, 3]
    assert run(*arguments(logits, temperature=0.0)).tolist() == [-1, -1, 50, 99, 3, 20]
    assert run(*arguments(torch.zeros(0, 100))).tolist() == []


def test_frequencies_follow_the_filtered_distribution() -> None:
    """Chi-square of 20,000 draws with different seeds, 5 degrees of freedom: beyond 25 once in 7,000 runs."""
    row = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -1.5, -4.0, -8.0])
    count, temperature, k, p = 20_000, 0.8, 7, 0.995
    inputs = arguments(row.expand(count, 8), temperature=temperature, top_k=k, top_p=p, seeds=torch.arange(count))
    found = torch.bincount(sample(*inputs), minlength=8).double()
    right = (row.double() / temperature).softmax(0)
    right[7] = 0  # top-k
    right /= right.sum()
    right[right.cumsum(0) - right >= p] = 0  # the row falls, so a running sum is that of top-p
    right /= right.sum()
    assert int((right > 0).sum()) == 6
    expected = right[right > 0] * count
    assert found[right == 0].sum() == 0
    assert float(((found[right > 0] - expected) ** 2 / expected).sum()) < 25


@pytest.mark.parametrize(("min_p", "kept"), [(0.0, 4), (0.3, 2), (1.0, 1)])
def test_min_p_keeps_what_is_likely_beside_the_likeliest(min_p: float, kept: int) -> None:
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log().expand(400, 4)
    assert sample(*arguments(logits, min_p=min_p, seeds=torch.arange(400))).unique().tolist() == list(range(kept))


def test_a_request_gets_the_same_tokens_in_any_batch() -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(8, 300, generator=generator)
    inputs = arguments(logits, top_k=50, seeds=torch.arange(8))
    together = sample(*inputs)
    order = torch.randperm(8, generator=generator)
    assert torch.equal(sample(*(x[order] for x in inputs)), together[order])
    assert torch.equal(sample(*(x[3:4] for x in inputs)), together[3:4])


def test_penalties_push_tokens_down() -> None:
    logits = torch.tensor([[2.0, 1.9, -1.0, -1.1]])
    tables = {"counts_SV": torch.tensor([[0, 0, 0, 0]], dtype=torch.int32), "prompt_SV": torch.zeros(1, 4).bool()}
    zero, one = torch.zeros(1), torch.ones(1)
    inputs = arguments(logits, temperature=0.0)
    assert sample(*inputs, one, zero, zero, *tables.values()).item() == 0
    tables["prompt_SV"][0, 0] = True
    assert sample(*inputs, 1.5 * one, zero, zero, *tables.values()).item() == 1  # 2.0 / 1.5 < 1.9
    assert sample(*inputs, one, one, one, *tables.values()).item() == 0  # of the prompt, not of the output
    observe(tables["counts_SV"], torch.tensor([0, -1]), torch.tensor([0, 1]))
    assert tables["counts_SV"].tolist() == [[1, 0, 0, 0]]
    assert sample(*inputs, one, 0.2 * one, zero, *tables.values()).item() == 1
    assert sample(*inputs, one, zero, 0.2 * one, *tables.values()).item() == 1


def test_only_allowed_tokens_are_drawn() -> None:
    allowed = torch.tensor([[0b1010, 1 << 3]], dtype=torch.int32)  # tokens 1, 3 and 35
    drawn = sample(*arguments(torch.zeros(200, 40), seeds=torch.arange(200)), allowed_BW=allowed.expand(200, 2))
    assert drawn.unique().tolist() == [1, 3, 35]


@given(total=st.integers(0, 2**59), fraction=st.integers(0, 2**31 - 1))
def test_shares_are_exact(total: int, fraction: int) -> None:
    assert share(torch.tensor(total), torch.tensor(fraction), 31).item() == total * fraction >> 31


@pytest.mark.gpu
def test_gpu_and_cpu_draw_the_same_tokens() -> None:
    for name, case in SAMPLE.cases.items():
        inputs = SAMPLE.inputs(case, torch.Generator("cuda").manual_seed(0))
        few = tuple(x[:6] for x in inputs)
        drawn = fast()(*few)
        assert drawn.tolist() == sample(*(x.cpu() for x in few)).tolist(), name


@pytest.mark.gpu
def test_one_graph_serves_other_logits_seeds_and_filters() -> None:
    inputs = tuple(x.cuda() for x in arguments(torch.randn(5, 50_000), top_k=50))
    fast()(*inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn = fast()(*inputs)
    for round_ in range(4):
        inputs[0].normal_()
        inputs[2].fill_(round_ * 20)
        inputs[3].fill_(1.0 - 0.2 * round_)
        inputs[6].add_(1)
        graph.replay()
        assert drawn.tolist() == sample(*inputs).tolist()
