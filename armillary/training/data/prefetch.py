"""Fetching ahead: while one group of a store's shards is read, the next one is brought onto this machine.

Only for orders that go through the shards in groups; what cannot be fetched is said when it is read.
"""

from __future__ import annotations

from contextlib import suppress
from threading import Thread

import numpy as np

from armillary.errors import ArmillaryError
from armillary.training.data.sample_order import group_at, shard_order
from armillary.training.data.shard_files import ShardFiles


class Ahead:
    """Remembers which group was fetched last."""

    def __init__(self, files: ShardFiles, edges: np.ndarray, *, mix: int, seed: int) -> None:
        self._files, self._edges, self._mix, self._seed = files, edges, mix, seed
        self._fetched: tuple[int, int] | None = None

    def reading(self, position: int) -> None:
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
