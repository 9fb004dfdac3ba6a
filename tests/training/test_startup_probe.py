"""The startup probe: the cost of a torch call and of a micro-batch, measured without changing the run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
import torch

from armillary.parallel.world import World
from armillary.spec.recipe import Recipe
from armillary.store.gauges import columns
from armillary.store.home import Home
from armillary.training import startup_probe
from armillary.training.data.loader import DeviceBatch
from armillary.training.prepare_run import model_source, resolve_run, train_recipe
from armillary.training.startup_probe import (
    CALLS_16BIT,
    CALLS_FP32,
    MAX_BYTES,
    MAX_MICRO_BATCHES,
    CallCostProbe,
    MicroBatchProbe,
    joinable,
    startup_costs,
)
from armillary.training.telemetry.profiled_step import profiled
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


def trainer_of(recipe: Recipe, home: Home) -> Trainer:
    begun = resolve_run(recipe, home, model_source(recipe, home))
    begun.prepare()
    return Trainer(begun.plan, World(rank=0, size=1, local_rank=0, device=torch.device("cpu")))


def trained(recipe: Recipe, home: Home) -> tuple[list[dict[str, float]], list[torch.Tensor], dict[str, float]]:
    """Gauges of the first steps, the weights after them, and what the probe measured before them."""
    with trainer_of(recipe, home) as trainer:
        torch.manual_seed(0)
        costs = startup_costs(trainer, 0)
        reports = [trainer.step(step) for step in range(4)]
        weights = [weight.detach().clone() for weight in trainer.model.parameters()]
    return [report.gauges for report in reports if report is not None], weights, costs


MIXED = pytest.param(EXPERTS, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "more",
    [("layout.recompute=full",), MIXED, DROPPED],
    ids=["again", "experts", "dropout"],
)
def test_a_run_is_bit_equal_with_and_without_the_probe(more: tuple[str, ...], recipe: Make, home: Home) -> None:
    plain, weights, none = trained(recipe("layout.micro_batch=2", *more), home)
    probed, same, costs = trained(recipe("layout.micro_batch=2", "train.profile_every=1000", *more), home)
    assert none == {} and set(costs) == {"torch_call_s", "micro_batch_overhead_fraction"}
    assert 0.0 <= costs["micro_batch_overhead_fraction"] <= 1.0 and 0 < costs["torch_call_s"] < 1e-3
    for name in ("loss", "grad_norm", *(["router_entropy"] if more is EXPERTS else [])):
        assert [gauges[name] for gauges in probed] == [gauges[name] for gauges in plain]
    assert all(torch.equal(one, other) for one, other in zip(weights, same, strict=True))


def test_the_first_step_reports_the_costs_and_no_other_does(recipe: Make, home: Home) -> None:
    done = train_recipe(recipe("layout.micro_batch=2", "train.profile_every=1000", "train.steps=5"), home=home)
    table = columns(done.run.gauges, ["loss", "torch_call_s", "micro_batch_overhead_fraction"])
    for name in ("torch_call_s", "micro_batch_overhead_fraction"):
        assert table[name][0] is not None and table[name][1:] == [None] * 4


def test_only_micro_batches_that_a_rank_can_pass_by_itself_are_joined(recipe: Make, home: Home) -> None:
    with trainer_of(recipe("layout.micro_batch=2"), home) as trainer:
        plan, sharded = trainer.plan, trainer.sharded
    assert joinable(plan, sharded) and plan.train is not None
    assert not joinable(replace(plan, train=replace(plan.train, compile=True)), sharded)
    for other in ({"micro_batch": 8}, {"offload": "activations"}, {"tp": 2}, {"pp": 2}, {"cp": 2}, {"ep": 2}):
        assert not joinable(replace(plan, layout=replace(plan.layout, **other)), sharded), other


# --- the probes


@pytest.mark.parametrize(("precision", "calls"), [("bf16", CALLS_16BIT), ("fp32", CALLS_FP32)])
def test_a_small_layer_has_as_many_calls_as_is_said(precision: str, calls: int) -> None:
    probe = CallCostProbe(precision)
    with profiled() as gauges:
        probe.measure()
    assert gauges["kernels"] / 2 == pytest.approx(calls, rel=0.05), "two passes, of which the second is timed"


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
    """A CPU that takes so long for a micro-batch, and for each of its rows."""

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
    monkeypatch.setattr(startup_probe, "time", clock)
    probe = MicroBatchProbe(torch.nn.Linear(2, 2), clock.passes, rows=2)
    assert probe.fraction(batch_of(32)) == pytest.approx(expected)
    assert clock.most == 2 * MAX_MICRO_BATCHES, "of sixteen micro-batches"


def test_what_others_do_to_a_machine_is_not_the_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, late, held_up = Clock(3.0, 1.0), Random(0), 0.7
    monkeypatch.setattr(startup_probe, "time", clock)

    def passes(batch: DeviceBatch) -> None:
        clock.passes(batch)
        clock.now += 40 * late.random() if late.random() < held_up else 0.0

    probe = MicroBatchProbe(torch.nn.Linear(2, 2), passes, rows=2)
    assert [probe.fraction(batch_of(32)) for _ in range(16)][-1] == pytest.approx(0.6)


def test_rows_that_keep_too_much_are_not_joined() -> None:
    layer = torch.nn.Linear(4, 4)

    def passes(batch: DeviceBatch) -> None:
        large = torch.ones(int(MAX_BYTES / 4 / 4 * 0.7), 4, requires_grad=True)
        layer(large).square().mean().backward()

    assert MicroBatchProbe(layer, passes, rows=1).fraction(batch_of(8)) is None
    assert MicroBatchProbe(layer, lambda batch: None, rows=1).fraction(batch_of(8, length=2000)) is None, "long rows"


def test_gradients_are_put_back() -> None:
    layer = torch.nn.Linear(2, 2)
    layer.weight.grad = torch.full((2, 2), 7.0)
    MicroBatchProbe(
        layer, lambda batch: layer(torch.ones(len(batch.row_targets), 2)).sum().backward(), rows=1
    ).fraction(batch_of(4))
    assert torch.equal(layer.weight.grad, torch.full((2, 2), 7.0)) and layer.bias.grad is None
