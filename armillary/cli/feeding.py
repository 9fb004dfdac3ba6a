"""What `bench loader` feeds from: prepared token shards, as training reads them, and as plain as they can be read.

Both are small objects that pickle, because loader workers are other processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class TrainingBatches:
    """Batches exactly as a training step gets them: shuffled windows with targets, positions and documents."""

    folder: Path
    """prepared shards"""
    sequence: int
    """tokens in a row"""
    batch: int
    """rows"""

    def __call__(self, worker: int, workers: int) -> Iterator[Any]:
        from armillary.training.data.batches import Batches
        from armillary.training.data.shards import TokenShards

        batches = Batches(shards=TokenShards.open(self.folder), sequence=self.sequence, batch=self.batch)
        return (batches.at(step) for step in count(worker, workers))


@dataclass(frozen=True, kw_only=True)
class PlainReads:
    """The same number of ids, straight from the memory-mapped files in their order: what the path costs beyond this is
    shuffling and packing."""

    folder: Path
    """prepared shards"""
    sequence: int
    """tokens in a row"""
    batch: int
    """rows"""

    def __call__(self, worker: int, workers: int) -> Iterator[Any]:
        from armillary.training.data.shards import TokenShards

        shards = TokenShards.open(self.folder)
        size = min(self.sequence * self.batch, shards.num_tokens)
        places = shards.num_tokens - size + 1
        return (shards.read(number * size % places, size) for number in count(worker, workers))
