"""A step whose loss or gradients are no numbers is never taken, on any layout; then the run stops, or skips it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from armillary.errors import ArmillaryError
from armillary.model.transformer import build
from armillary.parallel.apply import Sharded
from armillary.parallel.ddp import local_of
from armillary.parallel.world import join_world
from armillary.spec.plan import Plan
from armillary.spec.recipe import Recipe
from armillary.spec.tables.train import TrainJob
from armillary.store.home import Home
from armillary.training.prepare_run import ResolvedRun, model_source, resolve_run
from armillary.training.step.host_adamw import HostAdamW
from armillary.training.step.nonfinite import MOST_IN_A_ROW
from armillary.training.step.optimizer import (
    _checked_step,
    make_optimizer,
    parameter_groups,
    states_by_name,
    weights_by_name,
)
from armillary.training.trainer import Trainer
from tests.model.layers.test_attention_forms import small
from tests.ranks import Ranks

Make = Callable[..., Recipe]
STOPS = r"(loss|grad_norm) is nan at step 1.*; the step was not taken and the weights are as before it: try --set train"


def begin(recipe: Recipe, home: Home) -> ResolvedRun:
    begun = resolve_run(recipe, home, model_source(recipe, home), cpu_ranks=4)
    begun.prepare()
    return begun


@contextmanager
def poisoned(trainer: Trainer, rank: int, bad: list[int]) -> Iterator[list[int]]:
    """The loss of one rank is no number in the steps of `bad`; append the step that runs to what this gives."""
    now, plain = [0], Sharded.loss_sum

    def loss_sum(self: Sharded, *args: Any, **options: Any) -> Tensor:
        wrong = now[-1] in bad and trainer.world.rank == rank and torch.is_grad_enabled()
        return plain(self, *args, **options) * (math.nan if wrong else 1.0)

    with mock.patch.object(Sharded, "loss_sum", loss_sum):
        yield now


def everything(trainer: Trainer) -> dict[str, Tensor]:
    """Weights, optimiser states and buffers of this rank."""
    found = weights_by_name(trainer.model, trainer.optimizer) | states_by_name(trainer.model, trainer.optimizer)
    found |= {f"buffer {name}": value for name, value in trainer.model.named_buffers()}
    device = {f"device {name}": value.detach() for name, value in trainer.model.named_parameters()}
    return {name: local_of(value).clone() for name, value in (found | device).items()}


def changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> list[str]:
    return [name for name, value in before.items() if not torch.equal(value, after[name])]


def stopped(plan_text: str, rank: int) -> tuple[str, list[str], list[str]]:
    """On each rank: what step 1 said, what it changed, and what step 0 had changed."""
    plan = Plan.from_json(plan_text, "test")
    with join_world("cpu") as world, Trainer(plan, world) as trainer, poisoned(trainer, rank, [1]) as now:
        first = everything(trainer)
        trainer.step(0)
        before = everything(trainer)
        now.append(1)
        with pytest.raises(ArmillaryError) as said:
            trainer.step(1)
        return str(said.value), changed(before, everything(trainer)), changed(first, before)


LAYOUTS = [
    [],
    ["layout.micro_batch=2"],
    ["layout.offload=optimizer"],
    ["train.clip=0"],
    ["layout.dp=2", "layout.micro_batch=2"],
    ["layout.dp=2", "layout.zero=1"],
    ["layout.dp=2", "layout.zero=3"],
    ["layout.dp=2", "layout.zero=3", "layout.offload=optimizer"],
    ["layout.tp=2"],
    ["layout.pp=2", "layout.micro_batch=2"],
    ["layout.cp=2"],
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: " ".join(layout) or "one rank")
def test_a_nan_stops_the_run_before_the_update(layout: list[str], recipe: Make, home: Home, ranks: Ranks) -> None:
    begun = begin(recipe("train.warmup_steps=0", *layout), home)
    count, text = begun.plan.layout.num_devices, begun.plan.to_json()
    answers = [stopped(text, 0)] if count == 1 else ranks.run(count, stopped, text, count - 1)
    for said, wrong, moved in answers:
        assert wrong == [], "weights and states are those of step 0"
        assert moved, "step 0 was taken"
        assert re.match(STOPS, said), said
        if count > 1 and "layout.tp=2" not in layout:
            assert f" at step 1 on rank {count - 1};" in said


def test_skipping_goes_on_with_the_next_batch(recipe: Make, home: Home) -> None:
    begun = begin(recipe("train.on_nonfinite=skip", "train.warmup_steps=0", "train.steps=40"), home)
    bad = [1, *range(4, 40)]
    with join_world("cpu") as world, Trainer(begun.plan, world) as trainer, poisoned(trainer, 0, bad) as now:
        trainer.step(0)
        before = everything(trainer)
        now.append(1)
        report = trainer.step(1)
        assert report is not None and math.isnan(report.gauges["loss"])
        assert changed(before, everything(trainer)) == [] and report.gauges["skipped_steps_total"] == 1
        now.append(2)
        report = trainer.step(2)
        assert report is not None and math.isfinite(report.gauges["loss"]) and changed(before, everything(trainer))
        assert all(int(value) == 2 for name, value in everything(trainer).items() if name.endswith(".step"))
        with pytest.raises(ArmillaryError, match=rf"{MOST_IN_A_ROW} steps in a row were skipped"):
            for step in range(4, 4 + MOST_IN_A_ROW):
                now.append(step)
                trainer.step(step)


@pytest.mark.parametrize("kind", ["fused", "host"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_optimisers_leave_everything_alone(kind: str, bad: float) -> None:
    model = build(small(), dtype=torch.float32, device="cpu", seed=0)
    options: dict[str, Any] = {"lr": 0.0, "betas": (0.9, 0.95), "eps": 1e-8}
    host = HostAdamW(model, parameter_groups(model, 0.1), device=torch.device("cpu"), **options)
    optimizer = make_optimizer(model, TrainJob()) if kind == "fused" else host

    def take(check: float) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.1
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.5 if math.isfinite(check) else check)
        told = torch.tensor(check)
        _checked_step(optimizer, told) if kind == "fused" else host.step(check=told)

    def kept() -> dict[str, Tensor]:
        found = weights_by_name(model, optimizer) | states_by_name(model, optimizer)
        return {name: value.clone() for name, value in found.items()}

    take(1.0)
    before = kept()
    take(bad)
    assert changed(before, kept()) == []
    take(1.0)
    assert len(changed(before, kept())) == len(before), "the next one is taken"
