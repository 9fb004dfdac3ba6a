"""The values of a step are read back once, before the optimizer is done; nothing else waits for the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from armillary.parallel.world import join_world
from armillary.spec.recipe import Recipe
from armillary.store.home import Home
from armillary.training import trainer as trainer_module
from armillary.training.prepare_run import model_source, resolve_run
from armillary.training.telemetry.async_readback import AsyncReadback
from armillary.training.trainer import Trainer

Make = Callable[..., Recipe]


CPU = torch.device("cpu")


def test_numbers_by_name() -> None:
    readback = AsyncReadback(CPU)
    read = readback.copy({"loss": torch.tensor(2.5), "grad_norm": torch.tensor([0.5], dtype=torch.float64)})
    assert read() == {"loss": 2.5, "grad_norm": 0.5} and readback.copy({})() == {}


class Event:
    """A moment of a device that is not there."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def elapsed_time(self, later: Event) -> float:
        return 1e3 * (later.seconds - self.seconds)


@pytest.mark.parametrize(("away", "tail"), [(0.003, 0.003), (0.5, 0.008)])
def test_what_the_device_did_while_the_host_was_away_counts(
    monkeypatch: pytest.MonkeyPatch, away: float, tail: float
) -> None:
    """The optimiser runs for 8 ms after the numbers are there; the host is away for shorter, or for longer."""
    now, readback = [100.0], AsyncReadback(CPU)
    readback._timer.on_gpu = True
    monkeypatch.setattr("armillary.training.telemetry.async_readback.time.perf_counter", lambda: now[0])
    readback.start()
    readback.finish(Event(1.0), Event(1.008))
    assert readback.overrun_s == 0.0
    now[0] += away
    readback.start()
    now[0] += 0.4
    readback.finish(Event(1.4), Event(1.408))
    assert readback.overrun_s == pytest.approx(tail)


class Asked(TorchDispatchMode):
    """How often a tensor's number is asked for by itself, which waits for a device."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_a_step_reads_its_numbers_before_it_steps_and_asks_for_nothing_else(
    recipe: Make, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = recipe()
    begun, order = resolve_run(ready, home, model_source(ready, home)), []
    begun.prepare()
    with join_world("cpu") as world, Trainer(begun.plan, world) as trainer:
        trainer.step(0)
        trainer.step(1)
        update, copy = trainer_module.update, trainer.telemetry.readback.copy
        readback = trainer.telemetry.readback
        monkeypatch.setattr(readback, "copy", lambda values: order.append(sorted(values)) or copy(values))
        monkeypatch.setattr(trainer_module, "update", lambda *args: order.append("update") or update(*args))
        with Asked() as asked:
            assert trainer.step(2) is not None
    assert asked.count == 0
    assert order == ["update", ["grad_norm", "loss"], []]
