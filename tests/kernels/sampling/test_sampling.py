"""Sampling: the same tokens from kernels and plain torch, the distribution that the filters promise, odd rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from armillary.kernels.sampling.sampling import SAMPLE, Draws, Penalties, sample, share
from armillary.kernels.sampling.sampling import sample_rows as row_by_row
from tests.kernels.interpreter import needs_interpreter


def fast():  # type: ignore[no-untyped-def]
    return SAMPLE.version("triton").load()  # type: ignore[union-attr]


def arguments(logits: Tensor, **given: Any) -> tuple[Tensor, Draws]:
    """A row's worth of defaults for each row: temperature 1, no filters, seed 0, step = row."""
    count = logits.shape[0]
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seeds": 0} | given
    dtypes = {"top_k": torch.int32, "seeds": torch.int64}
    each = {
        f"{name}_B": torch.as_tensor(value, dtype=dtypes.get(name, torch.float32)).expand(count).contiguous()
        for name, value in values.items()
    }
    return logits, Draws(**each, steps_B=torch.arange(count))


def mapped(x: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same with every tensor changed, those of Draws and Penalties too."""
    if isinstance(x, tuple):
        return tuple(mapped(part, change) for part in x)
    if isinstance(x, Draws | Penalties):
        return type(x)(**{field.name: mapped(getattr(x, field.name), change) for field in dataclasses.fields(x)})
    return change(x) if isinstance(x, Tensor) else x


@st.composite
def calls(draw: st.DrawFn) -> tuple[Any, ...]:
    """Rows of every kind in one batch."""
    count, vocab = draw(st.sampled_from([1, 3])), draw(st.sampled_from([2, 33, 700, 5003]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    logits = torch.randn(count, vocab, generator=generator) * draw(st.sampled_from([0.01, 1.0, 20.0]))
    logits = logits.to(draw(st.sampled_from([torch.float32, torch.bfloat16])))

    def each(*options: float) -> Tensor:
        return torch.tensor([draw(st.sampled_from(options)) for _ in range(count)])

    draws = Draws(
        temperature_B=each(0.0, 0.3, 1.0, 1.7),
        top_k_B=each(0, 0, 1, 7, 600).int(),
        top_p_B=each(1.0, 0.999, 0.9, 0.3, 0.0),
        min_p_B=each(0.0, 0.0, 0.05, 1.0),
        seeds_B=torch.randint(1 << 62, (count,), generator=generator),
        steps_B=torch.arange(count) + draw(st.sampled_from([0, 1 << 33])),
    )
    penalties, allowed = None, None
    if draw(st.booleans()):
        rows = count + 2
        penalties = Penalties(
            repetition_B=each(1.0, 1.3, 0.7),
            presence_B=each(0.0, 0.5),
            frequency_B=each(0.0, 0.2, -0.1),
            counts_SV=torch.randint(-3, 4, (rows, vocab), generator=generator).clamp_min(0).int(),
            prompt_SV=torch.rand(rows, vocab, generator=generator) < 0.2,
            rows_B=torch.randperm(rows, generator=generator)[:count],
        )
    if draw(st.booleans()):
        words = -(-vocab // 32)
        allowed = torch.randint(-(2**31), 2**31 - 1, (count, words), generator=generator).int()
    return logits, draws, penalties, allowed


@needs_interpreter
@settings(max_examples=6, deadline=None)
@given(call=calls())
def test_kernels_draw_the_tokens_of_plain_torch(call: tuple[Any, ...]) -> None:
    assert fast()(*call).tolist() == sample(*call).tolist()


@settings(max_examples=30, deadline=None)
@given(call=calls())
def test_a_row_at_a_time_gives_the_same_tokens(call: tuple[Any, ...]) -> None:
    assert row_by_row(*call).tolist() == sample(*call).tolist()


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


@needs_interpreter
def test_parameters_that_lie_apart_and_a_min_p_beyond_one() -> None:
    logits, draws = arguments(torch.randn(3, 100), temperature=torch.tensor([0.5, 9.0, 1.0]), min_p=2.0)
    apart = mapped(draws, lambda x: torch.stack((x, x + 1), dim=1)[:, 0])
    largest = logits.argmax(dim=1).tolist()
    for run in (fast(), sample, row_by_row):
        assert run(logits, apart).tolist() == largest


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
    assert torch.equal(sample(*mapped(inputs, lambda x: x[order])), together[order])
    assert torch.equal(sample(*mapped(inputs, lambda x: x[3:4])), together[3:4])


def test_penalties_push_tokens_down() -> None:
    logits = torch.tensor([[2.0, 1.9, -1.0, -1.1]])
    counts, prompt = torch.tensor([[0, 0, 0, 0]], dtype=torch.int32), torch.zeros(1, 4).bool()

    def penalised(repetition: float, presence: float, frequency: float) -> float:
        each = {"repetition_B": repetition, "presence_B": presence, "frequency_B": frequency}
        how = Penalties(**{name: torch.tensor([x]) for name, x in each.items()}, counts_SV=counts, prompt_SV=prompt)
        return sample(*arguments(logits, temperature=0.0), how).item()

    assert penalised(1.0, 0.0, 0.0) == 0
    prompt[0, 0] = True
    assert penalised(1.5, 0.0, 0.0) == 1  # 2.0 / 1.5 < 1.9
    assert penalised(1.0, 1.0, 1.0) == 0  # of the prompt, not of the output
    counts[0, 0] = 1  # put out once
    assert penalised(1.0, 0.2, 0.0) == 1
    assert penalised(1.0, 0.0, 0.2) == 1


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
        few = mapped(inputs, lambda x: x[:6])
        assert fast()(*few).tolist() == sample(*mapped(few, Tensor.cpu)).tolist(), name


@pytest.mark.gpu
def test_one_graph_serves_other_logits_seeds_and_filters() -> None:
    inputs = mapped(arguments(torch.randn(5, 50_000), top_k=50), Tensor.cuda)
    fast()(*inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn = fast()(*inputs)
    for round_ in range(4):
        inputs[0].normal_()
        inputs[1].top_k_B.fill_(round_ * 20)
        inputs[1].top_p_B.fill_(1.0 - 0.2 * round_)
        inputs[1].steps_B.add_(1)
        graph.replay()
        assert drawn.tolist() == sample(*inputs).tolist()
