"""Held-out rows in their own order, the same ones at every validation and for every number of ranks.

Of a blend, every batch has rows of each source in the blend's proportion; a source that is through gives blank rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from armillary.training.data.batch import IGNORED, LAYOUT, Batch
from armillary.training.data.batches import positions_of
from armillary.training.data.blend import Turns, blended
from armillary.training.data.row_packing import Packing, Rows, make_rows
from armillary.training.data.shards import TokenShards


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """The held-out rows of one source."""

    shards: TokenShards
    """the validation split"""
    sequence: int
    """positions of a row"""
    packing: Packing = "stream"
    """how documents become rows"""

    @cached_property
    def _rows(self) -> Rows:
        return make_rows(self.shards, self.sequence, self.packing)

    @property
    def num_samples(self) -> int:
        """Rows, the last of which may be short."""
        if self.packing == "stream":
            return -(-max(0, self.shards.num_tokens - 1) // self.sequence)
        return int(self._rows.edges[-1])

    def rows_at(self, positions: np.ndarray) -> Batch:
        """The rows with these numbers; blank ones beyond the end."""
        shape = (len(positions), self.sequence)
        arrays: dict[str, np.ndarray] = {name: np.zeros(shape, dtype) for name, dtype in LAYOUT.items()}
        arrays["targets_BT"].fill(IGNORED)
        arrays["positions_BT"][:] = np.arange(self.sequence)
        there = positions < self.num_samples
        if there.any():
            part_rows = self._rows.make(positions[there])
            for name, array in arrays.items():
                array[there] = getattr(part_rows, name)
        return Batch(**arrays)


@dataclass(frozen=True, kw_only=True)
class Validation:
    """What a validation reads."""

    parts: tuple[HeldOut, ...]
    """sources with held-out text"""
    counts: tuple[int, ...]
    """rows of each in a round"""

    def batches(self, *, rows: int, limit: int | None = None, rank: int = 0, world: int = 1) -> Iterator[Batch]:
        """At most `limit` batches of `rows` rows over all ranks, all of one shape: padding and blank rows are IGNORED,
        so weigh losses by `num_targets`. None where nothing is held out."""
        turns = Turns(counts=self.counts)
        for number in range(self._num_batches(rows))[:limit]:
            yield blended(self.parts, *turns.at(positions_of(number, rows, rank, world)))

    def _num_batches(self, rows: int) -> int:
        """Until every source is through."""
        each = zip(self.parts, self.counts, strict=True)
        return max((-(-part.num_samples * sum(self.counts) // (count * rows)) for part, count in each), default=0)
