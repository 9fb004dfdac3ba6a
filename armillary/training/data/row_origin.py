"""Where the rows of a batch come from: shard and documents, to name the samples of a batch that was skipped."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from armillary.training.data.batch import BatchSource
from armillary.training.data.batch_sources import Batches, Blend, positions_of
from armillary.training.data.row_packing import WholeRows
from armillary.training.data.sample_order import ids_at
from armillary.training.data.shards import TokenShards


@dataclass(frozen=True, kw_only=True)
class RowOrigin:
    """A row of a batch, or the part of it that lies in one shard: documents `first` to `last` of that shard."""

    row: int
    shard: str
    first: int
    last: int

    @property
    def text(self) -> str:
        documents = f"document {self.first}" if self.first == self.last else f"documents {self.first} to {self.last}"
        return f"{self.shard} {documents}"


def row_origins(source: BatchSource, step: int) -> list[RowOrigin]:
    """Of the batch of a step over all ranks; none where the source is not made of token shards."""
    positions = positions_of(step, source.batch, 0, 1)
    if isinstance(source, Batches):
        return [origin for row, position in enumerate(positions) for origin in _origins(source, row, int(position))]
    if not isinstance(source, Blend):
        return []
    matches: list[RowOrigin] = []
    for row, (part, position) in enumerate(zip(*source.order.at(positions), strict=True)):
        batches = source.parts[int(part)]
        matches += _origins(batches, row, int(position)) if isinstance(batches, Batches) else []
    return matches


def shards_text(origins: Sequence[RowOrigin]) -> str:
    """'train/00002.bin (8 rows), …': the shards of a batch, those with most rows first."""
    counts = Counter(shard for shard, _ in {(origin.shard, origin.row) for origin in origins})
    return ", ".join(f"{shard} ({count} row{'s' * (count > 1)})" for shard, count in counts.most_common(4))


def _origins(batches: Batches, row: int, position: int) -> Iterator[RowOrigin]:
    number = int(ids_at(batches.seed, np.array([position]), batches.rows.edges, mix=batches.mix)[0])
    for start, length in _pieces(batches, number):
        for shard, first, last in batches.shards.within(start, length):
            low, high = _documents(batches.shards, shard, first, last)
            yield RowOrigin(row=row, shard=batches.shards.files.name(shard), first=low, last=high)


def _pieces(batches: Batches, number: int) -> list[tuple[int, int]]:
    """(start, length) of what a row is made of, in the one long row of all shards."""
    if isinstance(batches.rows, WholeRows):
        return batches.rows.pieces(number)
    return [(number * batches.sequence, batches.sequence)]


def _documents(shards: TokenShards, shard: int, first: int, last: int) -> tuple[int, int]:
    """Numbers within their shard of the documents that hold the tokens `first` … `last` - 1 of it."""
    offsets = shards.files.offsets(shard)
    low, high = (int(np.searchsorted(offsets, np.uint64(edge), side="right")) - 1 for edge in (first, last - 1))
    return low, high
