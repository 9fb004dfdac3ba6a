"""Fetching ahead: the next group of shards, once, and never loudly."""

import threading

import numpy as np
import pytest

from armillary.errors import BadData
from armillary.training.data.batch_sources import ShardPrefetcher
from armillary.training.data.sample_order import ids_at

SIZES = np.array([10, 10, 5, 15, 10])
EDGES = np.concatenate([[0], np.cumsum(SIZES)])


class Files:
    """Notes what is fetched; shard 3 cannot be."""

    def __init__(self) -> None:
        self.fetched: list[int] = []

    def fetch(self, number: int) -> None:
        self.fetched.append(number)
        if number == 3:
            raise BadData("gone; said when it is read")


def settled(files: Files) -> list[int]:
    for thread in threading.enumerate():
        if thread.name == "fetch ahead":
            thread.join(10)
    return sorted(files.fetched)


@pytest.mark.parametrize("mix", [1, 2, 3])
def test_the_group_that_is_read_next_is_the_one_fetched(mix: int) -> None:
    files = Files()
    ahead = ShardPrefetcher(files, EDGES, mix=mix, seed=4)  # type: ignore[arg-type]
    ids = ids_at(4, np.arange(150), EDGES, mix=mix)
    shards = (np.searchsorted(EDGES, ids, side="right") - 1).tolist()
    groups = -(-5 // mix)
    for epoch in range(2):
        for group in range(groups):
            wanted = sorted(ahead.shards(epoch, group))
            before = [shard for earlier in range(group) for shard in ahead.shards(epoch, earlier)]
            first, count = 50 * epoch + SIZES[before].sum(), SIZES[wanted].sum()
            assert sorted(set(shards[first : first + count])) == wanted
            files.fetched.clear()
            for position in range(first, first + count):
                ahead.advance(position)
            after = ahead.shards(epoch, group + 1) if group + 1 < groups else ahead.shards(epoch + 1, 0)
            fetched = settled(files)
            assert set(fetched) <= set(after) and (fetched == sorted(after) or 3 in after)
