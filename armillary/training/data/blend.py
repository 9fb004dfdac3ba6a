"""A blend: rows of several sources in exact proportion, at every moment of a run, as a pure function of (seed, step).

Each row of a round has its source in a table. A source with share w of n rows has had more than n·w - 1 and less than
n·w + 1 of them after any number of rows, and exactly n·w at the end of a round.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from armillary.training.data.batch import LAYOUT, Batch
from armillary.training.data.batches import positions_of


class Part(Protocol):
    """One source of a blend."""

    @property
    def sequence(self) -> int:
        """Tokens in a row."""

    @property
    def num_samples(self) -> int:
        """Rows of its epoch."""

    def rows_at(self, positions: np.ndarray) -> Batch:
        """The rows at these positions of its own endless order."""


def turns(counts: Sequence[int]) -> np.ndarray:
    """The source of each row of a round in which source k has counts[k] rows.

    The j-th row of a source falls due between j·n/count and (j + 1)·n/count; of those that are open, the one that is
    due first goes first (Baruah et al., "Proportionate progress", Algorithmica 1996, for a single machine).
    """
    total = sum(counts)
    opening = [(0, source, 0) for source in range(len(counts))]
    due: list[tuple[int, int, int]] = []
    table: np.ndarray = np.empty(total, np.int32)
    for row in range(total):
        while opening and opening[0][0] <= row:
            _, source, number = heapq.heappop(opening)
            heapq.heappush(due, (-(-(number + 1) * total // counts[source]), source, number))
        _, source, number = heapq.heappop(due)
        table[row] = source
        if number + 1 < counts[source]:
            heapq.heappush(opening, ((number + 1) * total // counts[source], source, number + 1))
    return table


@dataclass(frozen=True, kw_only=True)
class Turns:
    """Which source a row of the endless order comes from, and which of that source's rows it is."""

    counts: tuple[int, ...]
    """rows of each source in a round"""

    def at(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(source, position in that source's own order)."""
        table, before = self._round
        places: np.ndarray = positions % len(table)
        sources = table[places]
        return sources, positions // len(table) * np.array(self.counts)[sources] + before[places]

    @cached_property
    def _round(self) -> tuple[np.ndarray, np.ndarray]:
        """Source of each row of a round, and how many rows that source had before it."""
        table = turns(self.counts)
        before: np.ndarray = np.empty(len(table), np.int64)
        for source in range(len(self.counts)):
            before[table == source] = np.arange(self.counts[source])
        return table, before


@dataclass(frozen=True, kw_only=True)
class Blend:
    """Training batches of several sources."""

    parts: tuple[Part, ...]
    """the sources; each keeps its own order and starts a new epoch by itself"""
    turns: Turns
    """whose row comes when"""
    batch: int
    """rows of a step over all ranks (B)"""

    @property
    def sequence(self) -> int:
        return self.parts[0].sequence

    @property
    def steps_per_epoch(self) -> float:
        """Until the source that takes longest was seen once; others begin again before."""
        total = sum(self.turns.counts)
        each = zip(self.parts, self.turns.counts, strict=True)
        return max(part.num_samples * total / count for part, count in each) / self.batch

    def at(self, step: int, *, rank: int = 0, world: int = 1) -> Batch:
        """The rows of one rank at a step; the ranks' rows in order are the batch of `world=1`."""
        return blended(self.parts, *self.turns.at(positions_of(step, self.batch, rank, world)))


def blended(parts: Sequence[Part], sources: np.ndarray, positions: np.ndarray) -> Batch:
    """One batch whose row i is the row positions[i] of source sources[i]."""
    shape = (len(sources), parts[0].sequence)
    arrays: dict[str, np.ndarray] = {name: np.empty(shape, dtype) for name, dtype in LAYOUT.items()}
    for source, here in _each(sources):
        part_rows = parts[source].rows_at(positions[here])
        for name, array in arrays.items():
            array[here] = getattr(part_rows, name)
    return Batch(**arrays)


def _each(sources: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    for source in np.unique(sources).tolist():
        yield source, sources == source
