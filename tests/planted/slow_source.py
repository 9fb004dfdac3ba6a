"""Batches from a store that takes its time for every batch; it pickles, so that worker processes read it too."""

from __future__ import annotations

import time
from dataclasses import dataclass

from armillary.training.data.batch import Batch, BatchSource


@dataclass(frozen=True)
class SlowSource:
    """Another source, made slow."""

    source: BatchSource
    seconds: float

    @property
    def sequence(self) -> int:
        return self.source.sequence

    @property
    def batch(self) -> int:
        return self.source.batch

    @property
    def steps_per_epoch(self) -> float:
        return self.source.steps_per_epoch

    def at(self, step: int, *, rank: int = 0, world: int = 1) -> Batch:
        made = self.source.at(step, rank=rank, world=world)
        time.sleep(self.seconds)
        return made
