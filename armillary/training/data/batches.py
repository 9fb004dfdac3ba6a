"""Batches of one set of token shards: `at(step)` depends on the seed and the step only, not on the number of ranks.

Rows come in a new random order each epoch; which documents are neighbours in a row was settled when they were packed.
"""

from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cached_property
from threading import Thread

import numpy as np

from armillary.errors import ArmillaryError, BadData, BadInput
from armillary.training.data.batch import Batch
from armillary.training.data.remote import Remote
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
    """Training batches of a split."""

    shards: TokenShards
    """the training split"""
    sequence: int
    """tokens in a row (T)"""
    batch: int
    """rows of a step over all ranks (B)"""
    seed: int = 0
    """of the order"""
    packing: Packing = "stream"
    """how documents become rows"""
    mix: int = 0
    """shards whose rows are mixed with each other; 0: all"""

    def __post_init__(self) -> None:
        if self.sequence < 1 or self.batch < 1:
            raise BadInput(f"sequence {self.sequence} and batch {self.batch} must be at least 1; raise them")
        if self.num_samples < 1 and self.packing == "whole":
            nothing = f"{self.shards.folder} has no document with anything to learn in rows of {self.sequence}"
            raise BadData(f"{nothing}; use other text, or raise train.sequence")
        if self.num_samples < 1:
            raise BadData(
                f"{self.shards.folder} has {self.shards.num_tokens} training tokens, fewer than one sequence of "
                f"{self.sequence} and the token after it; use more text or --set train.sequence={self._fitting}"
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

    @property
    def _fitting(self) -> int:
        return max(1, self.shards.num_tokens - 1)

    def at(self, step: int, *, rank: int = 0, world: int = 1) -> Batch:
        """The rows of one rank at a step; the ranks' rows in order are the batch of `world=1`."""
        return self.rows_at(positions_of(step, self.batch, rank, world))

    def rows_at(self, positions: np.ndarray) -> Batch:
        """The rows at these positions of the endless order of epochs."""
        if self._ahead is not None and len(positions):
            self._ahead.advance(int(positions[-1]))
        return self.rows.make(ids_at(self.seed, positions, self.rows.edges, mix=self.mix))


def positions_of(step: int, batch: int, rank: int, world: int) -> np.ndarray:
    """Where the rows of one rank at a step stand in the endless order."""
    if batch % world:
        raise BadInput(f"a batch of {batch} rows does not divide among {world} ranks; use a multiple of {world}")
    rows = batch // world
    first = step * batch + rank * rows
    return np.arange(first, first + rows, dtype=np.int64)
