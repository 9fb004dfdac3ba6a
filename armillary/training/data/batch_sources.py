"""Batches for training and validation: `at(step)` depends on the seed and the step only, not on the number of ranks.

Rows of a source come in a new random order each epoch; which documents are neighbours in a row was settled when they
were packed. A blend has rows of several sources in exact proportion: a source with share w of n rows has had more than
n·w - 1 and less than n·w + 1 of them after any number of rows, and exactly n·w at the end of a round. Held-out rows
come in their own order, the same ones at every validation; a source that is through gives blank rows.
"""

import heapq
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cached_property
from threading import Thread
from typing import Protocol

import numpy as np

from armillary.errors import ArmillaryError, BadData, BadInput
from armillary.store.remote import Remote
from armillary.training.data.batch import LAYOUT, Batch, blank_rows, rows_per_rank
from armillary.training.data.row_packing import Packing, Rows, make_rows
from armillary.training.data.sample_order import group_at, ids_at, shard_order
from armillary.training.data.shard_files import ShardFiles
from armillary.training.data.shards import TokenShards


class ShardPrefetcher:
    """While one group of a store's shards is read, fetches the next one to this machine.

    Only for orders that go through the shards in groups; a fetch that fails is reported when the shard is read.
    """

    def __init__(self, files: ShardFiles, edges: np.ndarray, *, mix: int, seed: int) -> None:
        self._files, self._edges, self._mix, self._seed = files, edges, mix, seed
        self._fetched: tuple[int, int] | None = None

    def advance(self, position: int) -> None:
        """Rows up to `position` of the endless order are being read: fetch the group after theirs."""
        epoch, place = divmod(position, int(self._edges[-1]))
        group = int(group_at(np.array([place]), self._edges, self._mix, seed=self._seed, epoch=epoch)[0])
        last = (len(self._edges) - 2) // self._mix
        following = (epoch, group + 1) if group < last else (epoch + 1, 0)
        if following != self._fetched:
            self._fetched = following
            Thread(target=self._fetch, args=following, name="fetch ahead", daemon=True).start()

    def shards(self, epoch: int, group: int) -> list[int]:
        """Numbers of the shards of a group."""
        order = shard_order(len(self._edges) - 1, seed=self._seed, epoch=epoch)
        return order[group * self._mix : (group + 1) * self._mix].tolist()

    def _fetch(self, epoch: int, group: int) -> None:
        with suppress(ArmillaryError):
            for shard in self.shards(epoch, group):
                self._files.fetch(shard)


@dataclass(frozen=True, kw_only=True)
class Batches:
    """Training batches of one source: `batch` rows (B) of `sequence` tokens (T) per step over all ranks. The rows of
    `mix` shards are mixed with each other (0: of all)."""

    shards: TokenShards
    sequence: int
    batch: int
    seed: int = 0
    packing: Packing = "stream"
    mix: int = 0

    def __post_init__(self) -> None:
        if self.sequence < 1 or self.batch < 1:
            raise BadInput(f"sequence {self.sequence} and batch {self.batch} must be at least 1; raise them")
        if self.num_samples < 1 and self.packing == "whole":
            nothing = f"{self.shards.folder} has no document with anything to learn in rows of {self.sequence}"
            raise BadData(f"{nothing}; use other text, or raise train.sequence")
        tokens = self.shards.num_tokens
        if self.num_samples < 1:
            raise BadData(
                f"{self.shards.folder} has {tokens} training tokens, fewer than one sequence of {self.sequence} and "
                f"the token after it; use more text or --set train.sequence={max(1, tokens - 1)}"
            )

    @cached_property
    def rows(self) -> Rows:
        return make_rows(self.shards, self.sequence, self.packing)

    @cached_property
    def _ahead(self) -> ShardPrefetcher | None:
        grouped = isinstance(self.shards.folder, Remote) and 0 < self.mix < self.shards.num_shards
        return ShardPrefetcher(self.shards.files, self.rows.edges, mix=self.mix, seed=self.seed) if grouped else None

    def __getstate__(self) -> dict[str, object]:
        """Without what is made when it is first used: a worker makes its own."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def num_samples(self) -> int:
        """Rows of an epoch."""
        return int(self.rows.edges[-1])

    @property
    def steps_per_epoch(self) -> float:
        return self.num_samples / self.batch

    def at(self, step: int, *, rank: int = 0, world: int = 1) -> Batch:
        """The rows of one rank at a step; the ranks' rows in order, without blank ones, are the batch of `world=1`."""
        return self.rows_at(positions_of(step, self.batch, rank, world)).padded(rows_per_rank(self.batch, world))

    def rows_at(self, positions: np.ndarray) -> Batch:
        """The rows at these positions of the endless order of epochs."""
        if self._ahead is not None and len(positions):
            self._ahead.advance(int(positions[-1]))
        return self.rows.make(ids_at(self.seed, positions, self.rows.edges, mix=self.mix))


def positions_of(step: int, batch: int, rank: int, world: int) -> np.ndarray:
    """Where the rows of one rank at a step stand in the endless order; the first ranks have one more where the batch
    does not divide among them."""
    if world > batch:
        raise BadInput(f"a batch of {batch} rows is too small for {world} ranks; use {batch} ranks or a larger batch")
    rows, more = divmod(batch, world)
    first = step * batch + rank * rows + min(rank, more)
    return np.arange(first, first + rows + (rank < more), dtype=np.int64)


# --- blends


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


def source_table(counts: Sequence[int]) -> np.ndarray:
    """The source of each row of a round in which source k has counts[k] rows.

    The j-th row of a source is released at j·n/count and its deadline is (j + 1)·n/count; of those that are released,
    the one with the earliest deadline goes first (Baruah et al., "Proportionate progress", Algorithmica 1996).
    """
    total = sum(counts)
    upcoming = [(0, source, 0) for source in range(len(counts))]
    released: list[tuple[int, int, int]] = []
    table: np.ndarray = np.empty(total, np.int32)
    for row in range(total):
        while upcoming and upcoming[0][0] <= row:
            _, source, number = heapq.heappop(upcoming)
            heapq.heappush(released, (-(-(number + 1) * total // counts[source]), source, number))
        _, source, number = heapq.heappop(released)
        table[row] = source
        if number + 1 < counts[source]:
            heapq.heappush(upcoming, ((number + 1) * total // counts[source], source, number + 1))
    return table


@dataclass(frozen=True, kw_only=True)
class SourceOrder:
    """Which source a row of the endless order comes from, and which of that source's rows it is; `counts` are the rows
    of each source in a round."""

    counts: tuple[int, ...]

    def at(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(source, position in that source's own order)."""
        table, before = self._round
        places: np.ndarray = positions % len(table)
        sources = table[places]
        return sources, positions // len(table) * np.array(self.counts)[sources] + before[places]

    @cached_property
    def _round(self) -> tuple[np.ndarray, np.ndarray]:
        """Source of each row of a round, and how many rows that source had before it."""
        table = source_table(self.counts)
        before: np.ndarray = np.empty(len(table), np.int64)
        for source in range(len(self.counts)):
            before[table == source] = np.arange(self.counts[source])
        return table, before


@dataclass(frozen=True, kw_only=True)
class Blend:
    """Training batches of several sources, `batch` rows (B) per step over all ranks; each source has its own order and
    starts a new epoch by itself."""

    parts: tuple[Part, ...]
    order: SourceOrder
    batch: int

    @property
    def sequence(self) -> int:
        return self.parts[0].sequence

    @property
    def steps_per_epoch(self) -> float:
        """Until the source that takes longest was seen once; others begin again before."""
        each = zip(self.parts, self.order.counts, strict=True)
        return max(part.num_samples * sum(self.order.counts) / count for part, count in each) / self.batch

    def at(self, step: int, *, rank: int = 0, world: int = 1) -> Batch:
        """The rows of one rank at a step; the ranks' rows in order, without blank ones, are the batch of `world=1`."""
        positions = positions_of(step, self.batch, rank, world)
        return blended(self.parts, *self.order.at(positions)).padded(rows_per_rank(self.batch, world))


def blended(parts: Sequence[Part], sources: np.ndarray, positions: np.ndarray) -> Batch:
    """One batch whose row i is the row positions[i] of source sources[i]."""
    shape = (len(sources), parts[0].sequence)
    arrays: dict[str, np.ndarray] = {name: np.empty(shape, dtype) for name, dtype in LAYOUT.items()}
    for source in np.unique(sources).tolist():
        here = sources == source
        part_rows = parts[source].rows_at(positions[here])
        for name, array in arrays.items():
            array[here] = getattr(part_rows, name)
    return Batch(**arrays)


# --- held-out rows


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """The held-out rows of one source."""

    shards: TokenShards
    sequence: int
    packing: Packing = "stream"

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
        arrays = blank_rows(len(positions), self.sequence)
        there = positions < self.num_samples
        if there.any():
            part_rows = self._rows.make(positions[there])
            for name, array in arrays.items():
                array[there] = getattr(part_rows, name)
        return Batch(**arrays)


@dataclass(frozen=True, kw_only=True)
class Validation:
    """The sources with held-out text, and the rows of each in a round."""

    parts: tuple[HeldOut, ...]
    counts: tuple[int, ...]

    def batches(self, *, rows: int, limit: int | None = None, rank: int = 0, world: int = 1) -> Iterator[Batch]:
        """At most `limit` batches of `rows` rows over all ranks, all of one shape: padding and blank rows are IGNORED,
        so weigh losses by `num_targets`. None where nothing is held out."""
        each, total = zip(self.parts, self.counts, strict=True), sum(self.counts)
        last = max((-(-part.num_samples * total // (count * rows)) for part, count in each), default=0)
        order = SourceOrder(counts=self.counts)
        for number in range(last)[:limit]:
            positions = positions_of(number, rows, rank, world)
            yield blended(self.parts, *order.at(positions)).padded(rows_per_rank(rows, world))
