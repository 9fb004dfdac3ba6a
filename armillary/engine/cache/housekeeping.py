"""What running answers get in turn, a few of them in a step: even work instead of all at once."""

from __future__ import annotations

from armillary.engine.cache.kv_cache import KVCache
from armillary.engine.request.sequence import Sequence

_NAMED_AT_ONCE = 4
"""blocks an answer fills, about, before they get their names: together they take less time"""
_PLENTY = 4
"""free blocks for each that runs, from which on one may be taken before it is needed"""


class RoundRobin:
    """Each sequence once in `period` steps, about."""

    __slots__ = ("_next", "_period")

    def __init__(self, period: int) -> None:
        self._period, self._next = period, 0

    def take(self, running: list[Sequence]) -> list[Sequence]:
        """Those whose turn it is."""
        begin = self._next if self._next < len(running) else 0
        self._next = begin + len(running) // self._period + 1
        return running[begin : self._next]


class BlockUpkeep:
    """Names for blocks that answers have filled; and where there are plenty, their next block ahead, so that many never
    need one in the same step."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._growing, self._naming = RoundRobin(cache.block_tokens), RoundRobin(_NAMED_AT_ONCE * cache.block_tokens)

    def step(self, running: list[Sequence]) -> None:
        """One step's share."""
        cache = self._cache
        for seq in self._naming.take(running):
            cache.register_blocks(seq)
        if cache.pool.num_free > _PLENTY * len(running) * len(cache.groups):
            growing = self._growing.take(running)
            cache.extend([seq for seq in growing if seq.needs_block(ahead=cache.block_tokens)])
