"""Samples beside steps: what calls and micro-batches take, without a trace in the run itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
import torch

from armillary.parallel.world import World
from armillary.spec.recipe import Recipe
from armillary.store.home import Home
from armillary.training.data.loader import DeviceBatch
from armillary.training.prepare_run import start, starting_point
from armillary.training.telemetry import micro_batch_cost as joined_rows
from armillary.training.telemetry.call_cost import EARLY, HALF_CALLS, WIDE_CALLS, Samples, call_sample
from armillary.training.telemetry.micro_batch_cost import MOST, MOST_BYTES, JoinedRows, can_join
from armillary.training.telemetry.profiled_step import recorded
from armillary.training.trainer import Trainer

Make = Callable[..., Recipe]
EXPERTS = (
    "model.moe_every=1",
    "model.moe.num_experts=4",
    "model.moe.top_k=2",
    "model.moe.ffn=16",
    "model.family=glm4_moe",
    "model.moe.shared_ffn=16",
    "model.moe.score=sigmoid",
    "model.moe.selection_bias=true",
)
DROPPED = ("train.lora_rank=4", "train.lora_dropout=0.5", "train.lr=0.01")


def trainer_of(made: Recipe, home: Home) -> Trainer:
    begun = start(made, home, starting_point(made, home))
    begun.prepare()
    return Trainer(begun.plan, World(rank=0, size=1, local_rank=0, device=torch.device("cpu")))


def trained(made: Recipe, home: Home) -> tuple[list[dict[str, float]], list[torch.Tensor]]:
    """Gauges of the steps before the first that is recorded, and the weights after them."""
    with trainer_of(made, home) as trainer:
        torch.manual_seed(0)
        reports = [trainer.step(step) for step in range(EARLY.start + 2)]
        weights = [weight.detach().clone() for weight in trainer.model.parameters()]
    return [report.gauges for report in reports if report is not None], weights


@pytest.mark.parametrize("more", [("layout.recompute=full",), EXPERTS, DROPPED], ids=["again", "experts", "dropout"])
def test_a_run_is_bit_equal_with_samples_and_without(more: tuple[str, ...], recipe: Make, home: Home) -> None:
    plain, weights = trained(recipe("layout.micro_batch=2", *more), home)
    sampled, same = trained(recipe("layout.micro_batch=2", "train.profile_every=1000", *more), home)
    told = [one for one in sampled if "micro_batch_overhead_fraction" in one]
    assert len(told) == 2 and not any("torch_call_s" in one for one in plain)
    assert all(0.0 <= one["micro_batch_overhead_fraction"] <= 1.0 and one["torch_call_s"] > 0 for one in told)
    for name in ("loss", "grad_norm", *(["router_entropy"] if more is EXPERTS else [])):
        assert [one[name] for one in sampled] == [one[name] for one in plain]
    assert all(torch.equal(one, other) for one, other in zip(weights, same, strict=True))


def test_only_micro_batches_that_a_rank_can_pass_by_itself_are_joined(recipe: Make, home: Home) -> None:
    with trainer_of(recipe("layout.micro_batch=2"), home) as trainer:
        plan, sharded = trainer.plan, trainer.sharded
    assert can_join(plan, sharded) and plan.train is not None
    assert not can_join(replace(plan, train=replace(plan.train, compile=True)), sharded)
    for other in ({"micro_batch": 8}, {"offload": "activations"}, {"tp": 2}, {"pp": 2}, {"cp": 2}, {"ep": 2}):
        assert not can_join(replace(plan, layout=replace(plan.layout, **other)), sharded), other


# --- one sample


@pytest.mark.parametrize(("precision", "calls"), [("bf16", HALF_CALLS), ("fp32", WIDE_CALLS)])
def test_a_small_layer_has_as_many_calls_as_is_said(precision: str, calls: int) -> None:
    sample = call_sample(precision)
    _, told = recorded(sample)
    assert told["kernels"] / 2 == pytest.approx(calls, rel=0.05), "it passes twice, and times the second"


def batch_of(rows: int, length: int = 16) -> DeviceBatch:
    tokens_BT = torch.zeros(rows, length, dtype=torch.int64)
    return DeviceBatch(
        tokens_BT=tokens_BT,
        targets_BT=tokens_BT,
        positions_BT=tokens_BT,
        documents_BT=tokens_BT.int(),
        row_targets=(length,) * rows,
        row_documents=(1,) * rows,
    )


class Clock:
    """A processor that takes so long for a micro-batch, and for each of its rows."""

    def __init__(self, each: float, row: float) -> None:
        self.now, self.each, self.row, self.most = 0.0, each, row, 0

    def passes(self, batch: DeviceBatch) -> None:
        self.most = max(self.most, len(batch.row_targets))
        self.now += self.each + self.row * len(batch.row_targets)

    def thread_time(self) -> float:
        return self.now


@pytest.mark.parametrize(("each", "row", "expected"), [(3.0, 1.0, 0.6), (0.0, 1.0, 0.0), (1.0, 0.0, 1.0)])
def test_what_several_save_together_came_with_each(
    each: float, row: float, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(each, row)
    monkeypatch.setattr(joined_rows, "time", clock)
    joined = JoinedRows(torch.nn.Linear(2, 2), clock.passes, rows=2)
    assert joined.fraction(batch_of(32)) == pytest.approx(expected)
    assert clock.most == 2 * MOST, "of sixteen micro-batches"


def test_what_others_do_to_a_machine_is_not_the_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, late, held_up = Clock(3.0, 1.0), Random(0), 0.7
    monkeypatch.setattr(joined_rows, "time", clock)

    def passes(batch: DeviceBatch) -> None:
        clock.passes(batch)
        clock.now += 40 * late.random() if late.random() < held_up else 0.0

    joined = JoinedRows(torch.nn.Linear(2, 2), passes, rows=2)
    assert [joined.fraction(batch_of(32)) for _ in range(16)][-1] == pytest.approx(0.6)


def test_rows_that_keep_too_much_are_not_joined() -> None:
    layer = torch.nn.Linear(4, 4)

    def passes(batch: DeviceBatch) -> None:
        large = torch.ones(int(MOST_BYTES / 4 / 4 * 0.7), 4, requires_grad=True)
        layer(large).square().mean().backward()

    assert JoinedRows(layer, passes, rows=1).fraction(batch_of(8)) is None
    assert JoinedRows(layer, lambda batch: None, rows=1).fraction(batch_of(8, length=2000)) is None, "long rows"


def test_gradients_are_put_back() -> None:
    layer = torch.nn.Linear(2, 2)
    layer.weight.grad = torch.full((2, 2), 7.0)
    JoinedRows(layer, lambda batch: layer(torch.ones(len(batch.row_targets), 2)).sum().backward(), rows=1).fraction(
        batch_of(4)
    )
    assert torch.equal(layer.weight.grad, torch.full((2, 2), 7.0)) and layer.bias.grad is None


def test_samples_are_early_and_after_recorded_steps() -> None:
    samples = Samples(100, "fp32", None)
    turns = [step for step in range(250) if samples.beside(batch_of(2), step, step)]
    assert turns == list(EARLY), "time has hardly passed"
    samples._since -= 1000.0
    assert [step for step in range(250) if samples.beside(batch_of(2), step, 30 + step)] == [100, 200]
    assert not Samples(0, "fp32", None).beside(batch_of(2), 5, 5)
