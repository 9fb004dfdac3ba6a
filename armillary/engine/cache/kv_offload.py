"""KV offload: cold blocks of the prefix cache are kept in host memory, and loaded where that is cheaper than computing.

A block that the device's cache evicts is copied to the host first, unless the host has it already. Where a prompt
continues with blocks that only the host has, they are copied into free device blocks, and the step that starts the
request reads them. A preempted sequence leaves its full blocks to the prefix cache, so preemption swaps: what others
overwrite meanwhile is on the host, and comes back where loading takes less time than recomputation.

Nothing is moved here: copies go out with the next decision. Host block h is written as −h.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from armillary.engine.cache.block_pool import BlockPool
from armillary.engine.cache.kv_cache import Copy, KVCache, TableUpdate
from armillary.engine.cache.prefix_cache import PrefixCache

if TYPE_CHECKING:
    from armillary.engine.request.sequence import Sequence


@dataclass(frozen=True, kw_only=True)
class OffloadCosts:
    """Seconds to load blocks from the host, and to compute them again; both measured on this machine."""

    block_s: float = 0.0
    """of loading a block"""
    token_s: float = 1.0
    """of computing a prompt token, attention left out"""
    pair_s: float = 0.0
    """of a (query, key) pair of attention"""

    def pays(self, num_blocks: int, start: int, tokens: int) -> bool:
        """Whether loading `num_blocks` takes less time than computing the tokens from `start` on that they hold."""
        recomputed_s = tokens * (self.token_s + self.pair_s * (start + (tokens + 1) / 2))
        return num_blocks * self.block_s < recomputed_s


class KVOffload:
    """Blocks in host memory, least recently used first to go."""

    def __init__(self, cache: KVCache, num_blocks: int, costs: OffloadCosts | None = None) -> None:
        assert cache.prefix, "blocks are found on the host by their hashes"
        self.cache = cache
        self.costs = costs or OffloadCosts()
        self.pool = BlockPool(num_blocks + 1)  # all of its blocks are free: the order in which they are reused
        self.hashes = PrefixCache(self.pool, len(cache.groups))
        self.num_offloaded = self.num_loaded = 0  # blocks copied since the start
        self.declined = 0  # tokens computed again because that was cheaper than loading them
        self.swapped_in = 0  # tokens of preempted sequences that were loaded
        cache.offload = self
        cache.prefix_cache.on_evict = self.evicted

    @property
    def num_blocks(self) -> int:
        return self.pool.num_blocks - 1

    @property
    def used_fraction(self) -> float:
        return self.hashes.num_hashed / self.num_blocks

    def evicted(self, block: int) -> None:
        """The device's cache is about to lose a block: keep it, unless it is here."""
        device = self.cache.prefix_cache
        group, name = device.groups[block], device.digests[block]
        slot = self.hashes.by_digest[group].get(name)
        if slot:
            self._touch([slot])
        elif self.pool.num_free:  # the others are being loaded
            (slot,) = self.pool.allocate(1)
            self.hashes.put(slot, group, name, device.parents[block], device.chunks[block], first=device.first[block])
            self.pool.release([slot])
            self.cache.copies.append(Copy(block, -slot))
            self.num_offloaded += 1

    def find(self, seq: Sequence, group: int, index: int) -> int:
        """The host block with a sequence's block that the device does not have, or 0."""
        chain, device = seq.chain, self.cache.prefix_cache.by_digest[group]
        name = chain.digests[index]
        return 0 if name in device else self.hashes.find(group, name, chain.parent(index), chain.chunks[index])

    def load(self, seq: Sequence, index: int, stop: int) -> int:
        """Append the blocks from `index` on to the tables of full-attention groups, from the host or the device, until
        one is missing or nothing is free; returns how many follow. 0 where computing them is cheaper."""
        cache, size = self.cache, self.cache.block_tokens
        rows = self._run(seq, index, stop)
        num_missing = sum(place < 0 for places in rows for place in places)
        tokens = len(rows) * size
        if not num_missing:
            return 0
        if not self.costs.pays(num_missing, index * size, tokens):
            self.declined += tokens
            return 0
        runs = {group: (index, [places[at] for places in rows]) for at, group in enumerate(cache.full_groups)}
        for group, blocks in self.bring(seq, runs).items():
            cache.table_updates.append(TableUpdate(seq.row, group, len(seq.tables[group]), blocks))
            seq.tables[group] += blocks
            seq.num_blocks += len(blocks)
        if seq.preemptions:
            self.swapped_in += tokens
        return len(rows)

    def bring(self, seq: Sequence, runs: Mapping[int, tuple[int, list[int]]]) -> dict[int, list[int]]:
        """Device blocks of runs (group -> first index, places) of a sequence's blocks, one holder more for each: device
        blocks themselves, and copies of host blocks (negative) in free ones."""
        pool = self.cache.pool
        slots = [-place for _, places in runs.values() for place in places if place < 0]
        for _, places in runs.values():  # before any block is allocated, which evicts others
            pool.share([place for place in places if place > 0])
        self.pool.share(slots)
        fresh = iter(pool.allocate(len(slots)))
        brought = {group: self._bring(seq, group, *run, fresh) for group, run in runs.items()}
        self.pool.release(slots)
        self.num_loaded += len(slots)
        return brought

    def _bring(self, seq: Sequence, group: int, index: int, places: list[int], fresh: Iterator[int]) -> list[int]:
        cache, chain, blocks = self.cache, seq.chain, []
        for at, place in enumerate(places, index):
            block = place if place > 0 else next(fresh)
            blocks.append(block)
            if place < 0:
                cache.copies.append(Copy(place, block))
                name, parent, chunk = chain.digests[at], chain.parent(at), chain.chunks[at]
                cache.prefix_cache.put(block, group, name, parent, chunk, first=not at)
        return blocks

    def forget(self, group: int, digest: bytes) -> None:
        """The content of a block is invalid."""
        slot = self.hashes.by_digest[group].get(digest)
        if slot:
            self.hashes.forget(slot)

    def clear(self) -> None:
        """Copies were lost: host blocks may hold anything."""
        self.hashes.clear()

    def _run(self, seq: Sequence, index: int, stop: int) -> list[list[int]]:
        """For each block from `index` on: its place in every full-attention group, a device block or −(host block);
        no more than there are free device blocks for."""
        cache, rows, needed = self.cache, [], 0
        refs, free = cache.pool.refs, cache.pool.num_free
        for at in range(index, stop):
            places = [cache.prefix_cache.of(seq.chain, g, at) or -self.find(seq, g, at) for g in cache.full_groups]
            needed += sum(place < 0 or not refs[place] for place in places)
            if not all(places) or needed > free:
                break
            rows.append(places)
        return rows

    def _touch(self, slots: list[int]) -> None:
        self.pool.share(slots)
        self.pool.release(slots)
