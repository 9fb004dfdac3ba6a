"""Telemetry never changes the training: the weights are the same without it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from armillary.parallel.world import join_world
from armillary.spec.plan import Plan
from armillary.spec.recipe import Recipe
from armillary.store.home import Home
from armillary.training.prepare_run import model_source, resolve_run
from armillary.training.telemetry.profiled_step import FIRST
from armillary.training.telemetry.step_telemetry import NullTelemetry, StepReport, StepTelemetry
from armillary.training.trainer import Trainer
from tests.ranks import Ranks

Make = Callable[..., Recipe]
STEPS = FIRST[0] + 2
"""the step that is measured by category and one that is profiled are among them"""


def trained(plan: str, telemetry: type[NullTelemetry]) -> tuple[list[torch.Tensor], list[StepReport]]:
    with join_world("cpu") as world, Trainer(Plan.from_json(plan), world, telemetry=telemetry) as trainer:
        torch.manual_seed(0)
        reports = [trainer.step(step) for step in range(STEPS)]
        trainer.validate()
        weights = [weight.detach().clone() for weight in trainer.model.parameters()]
    return weights, [report for report in reports if report is not None]


def both(plan: str) -> tuple[bool, list[StepReport], list[StepReport]]:
    """On each rank: whether the weights are bit-equal, and the reports with and without telemetry."""
    weights, reports = trained(plan, StepTelemetry)
    same, plain = trained(plan, NullTelemetry)
    return all(map(torch.equal, weights, same)), reports, plain


def plan_of(recipe: Recipe, home: Home) -> str:
    begun = resolve_run(recipe, home, model_source(recipe, home), cpu_ranks=4)
    begun.prepare()
    return begun.plan.to_json()


@pytest.mark.parametrize("every", [0, 3])
@pytest.mark.parametrize(
    "more",
    [(), pytest.param(("layout.recompute=full", "layout.micro_batch=2"), marks=pytest.mark.slow)],
    ids=["plain", "recompute"],
)
def test_weights_are_bit_equal_without_telemetry(
    every: int, more: tuple[str, ...], recipe: Make, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("armillary.training.telemetry.profiled_step.FIRST_S", 1e9)  # however slow this machine is
    equal, reports, plain = both(plan_of(recipe(f"train.profile_every={every}", "train.lr=0.01", *more), home))
    assert equal and len(reports) == len(plain) == STEPS
    assert [report.gauges["loss"] for report in reports] == [report.gauges["loss"] for report in plain]
    profiled = [report.step for report in reports if "compute_s" in report.gauges]
    assert profiled == ([2, 5, 7, 8] if every else [])
    assert set(plain[-1].gauges) == {"loss", "grad_norm", "lr", "tokens_total", "batch_checksum"}, (
        "nothing was measured"
    )
    assert set(plain[-1].gauges) < set(reports[-1].gauges)


@pytest.mark.parametrize(
    "layout",
    [
        ("layout.dp=2", "layout.zero=3"),
        pytest.param(("layout.pp=2", "layout.micro_batch=2"), marks=pytest.mark.slow),
    ],
)
def test_weights_are_bit_equal_on_two_ranks(layout: tuple[str, ...], recipe: Make, home: Home, ranks: Ranks) -> None:
    results = ranks.run(2, both, plan_of(recipe("train.profile_every=4", "train.lr=0.01", *layout), home))
    assert all(equal for equal, _, _ in results)
    gauges = results[0][1][-1].gauges
    assert "comm_exposed_s" in gauges and ("bubble_s" in gauges) == ("layout.pp=2" in layout)


def test_the_report_of_a_profiled_step_adds_up(recipe: Make, home: Home) -> None:
    with join_world("cpu") as world:
        assert not dist.is_initialized() and world.size == 1
    _, reports = trained(plan_of(recipe("train.profile_every=3"), home), StepTelemetry)
    for report in reports:
        gauges = report.gauges
        assert gauges["step_s"] >= gauges["data_wait_s"] >= 0 and gauges["tokens_total"] > 0
        assert ("memory_activations_bytes" in gauges) == (report.step == 1)
        assert ("compute_s" in gauges) == (report.sources.get("compute_s") == "profiler window")
