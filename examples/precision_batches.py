"""What a 16-bit dtype brings at each batch size, and what the first epoch costs more than later ones.

At a new shape and dtype the libraries choose and build their kernels, so the first steps of a run are slow. Each
precision is a new training at each batch size; precisions take turns, epoch by epoch.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from exercise import table
from precision_training import DTYPES, Settings, Training
from torch import Tensor

from armillary.units import seconds_text

EPOCHS = 3


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Batch sizes, and steps of an epoch."""

    batches: tuple[int, ...]
    steps: int


SIZES = {
    "quick": Sizes(batches=(4, 8), steps=2),
    "cpu": Sizes(batches=(4, 16, 64), steps=4),
    "cuda": Sizes(batches=(16, 64, 256, 1024, 4096), steps=20),
}


@dataclass(frozen=True, kw_only=True)
class AtBatch:
    """One precision at one batch size: the seconds of each of its epochs."""

    name: str
    batch: int
    steps: int
    epochs: tuple[float, ...]

    @property
    def later_s(self) -> float:
        """An epoch that is not the first."""
        return statistics.median(self.epochs[1:])

    @property
    def images_per_s(self) -> float:
        return self.batch * self.steps / self.later_s

    @property
    def overhead_s(self) -> float:
        """What the first epoch took more."""
        return self.epochs[0] - self.later_s


def over_batches(sizes: Sizes, settings: Settings, device: torch.device, data: tuple[Tensor, Tensor]) -> list[AtBatch]:
    """Every precision at every batch size. What is new to the process itself (threads, buffers) is paid before, at a
    size that is not in the table."""
    _epochs(max(1, sizes.batches[0] - 1), sizes.steps, settings, device, data)
    found = []
    for batch in sizes.batches:
        for name, epochs in _epochs(batch, sizes.steps, settings, device, data).items():
            found.append(AtBatch(name=name, batch=batch, steps=sizes.steps, epochs=tuple(epochs)))
    return found


def _epochs(
    batch: int, steps: int, settings: Settings, device: torch.device, data: tuple[Tensor, Tensor]
) -> dict[str, list[float]]:
    """Seconds of each epoch of every precision."""
    of_batch = replace(settings, batch=batch, steps=steps * EPOCHS)
    trainings = {name: Training(name, of_batch, device, data) for name in DTYPES}
    seconds: dict[str, list[float]] = {name: [] for name in DTYPES}
    for epoch in range(EPOCHS):
        for name, training in trainings.items():
            begin = time.perf_counter()
            for step in range(steps):
                float(training.step(epoch * steps + step))  # waits for the device
            seconds[name].append(time.perf_counter() - begin)
    return seconds


def gain(found: Sequence[AtBatch], one: AtBatch) -> float:
    """Images per second over those in fp32 at the same batch size."""
    base = next(each for each in found if each.batch == one.batch and each.name == "fp32")
    return one.images_per_s / base.images_per_s


def batch_table(found: Sequence[AtBatch]) -> str:
    rows = []
    for batch in dict.fromkeys(each.batch for each in found):
        mine = [each for each in found if each.batch == batch]
        rates = (f"{each.images_per_s:,.0f}" for each in mine)
        gains = (f"{gain(found, each):.2f} ×" for each in mine[1:])
        first = (f"{seconds_text(max(0.0, each.overhead_s))} of {seconds_text(each.later_s)}" for each in mine)
        rows.append((str(batch), *rates, *gains, *first))
    names = tuple(DTYPES)
    heads = ("batch", *(f"{name}, images/s" for name in names), *(f"{name} against fp32" for name in names[1:]))
    return table((*heads, *(f"first epoch adds, {name}" for name in names)), rows)
