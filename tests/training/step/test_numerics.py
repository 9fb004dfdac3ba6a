"""fp16 and its loss scale: steps that overflow are skipped and counted, and a run that cannot recover says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from armillary.errors import ArmillaryError
from armillary.spec.recipe import Recipe
from armillary.store.home import Home
from armillary.training.step.nonfinite import LossScaler
from armillary.training.telemetry.step_telemetry import StepReport
from armillary.training.trainer import Trainer
from tests.ranks import Ranks
from tests.training.test_loop import alone, begin, losses

Make = Callable[..., Recipe]


def reports(trainer: Trainer, steps: int) -> list[StepReport]:
    found = [trainer.step(step) for step in range(steps)]
    return [report for report in found if report is not None]


@pytest.mark.parametrize("precision", ["bf16", "fp16", "tf32"])
def test_every_precision_stays_near_fp32(precision: str, recipe: Make, home: Home) -> None:
    assert losses(recipe(f"layout.precision={precision}"), home) == pytest.approx(losses(recipe(), home), rel=0.02)


def test_a_step_that_overflows_is_skipped_and_the_scale_halved(recipe: Make, home: Home) -> None:
    begun = begin(recipe("layout.precision=fp16"), home)
    begun.prepare()
    with Trainer(begun.plan, alone()) as trainer:
        trainer.scaler.load_state_dict(trainer.scaler.state_dict() | {"scale": 2.0**40})
        before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
        first = reports(trainer, 1)[0].gauges
        assert first["skipped_steps_total"] == 1 and first["loss_scale"] == 2.0**39
        assert first["grad_norm"] == float("inf") or first["grad_norm"] != first["grad_norm"]
        assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))
        later = [trainer.step(step) for step in range(1, 30)]
    last = later[-1]
    assert last is not None and last.gauges["loss"] < first["loss"] and last.gauges["loss_scale"] < 2.0**39
    assert last.gauges["skipped_steps_total"] < 29, "once the scale fits, steps count again"


def test_overflow_whatever_the_scale_ends_the_run(recipe: Make, home: Home) -> None:
    begun = begin(recipe("layout.precision=fp16", "train.steps=100"), home)
    begun.prepare()
    with Trainer(begun.plan, alone()) as trainer:
        with torch.no_grad():
            next(trainer.model.parameters()).fill_(float("nan"))
        with pytest.raises(ArmillaryError, match=r"fp16 overflows at step \d+ .*; try --set layout.precision=fp32"):
            reports(trainer, 60)


def scale_on_ranks(broken: int) -> tuple[float, float, float]:
    """One rank's gradient overflows: (its own scale, weight, gradient) after the step."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight = torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    gradient = torch.full((4,), 1024.0)
    gradient[broken] = float("inf")
    weight.grad = distribute_tensor(gradient, mesh, [Shard(0)])
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scaler = LossScaler(torch.device("cpu"), enabled=True, many=True)
    scaler.load_state_dict(scaler.state_dict() | {"scale": 1024.0})
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    local: Any = weight.detach().to_local()
    return scaler.get_scale(), float(local[0]), float(weight.grad.to_local().max())


def test_ranks_skip_together(ranks: Ranks) -> None:
    one, other = ranks.run(2, scale_on_ranks, 3)
    assert one[:2] == other[:2] == (512.0, 1.0), "only the second rank saw the overflow"
    assert one[2] == 1.0 and other[2] == float("inf")
