"""Periodic cache work for running sequences, a few of them per step: even work instead of all at once."""

from armillary.engine.cache.kv_cache import KVCache
from armillary.engine.request.sequence import Sequence

_HASHED_AT_ONCE = 4
"""blocks that a sequence fills, about, before they are hashed: together they take less time"""
_PLENTY = 4
"""free blocks per running sequence from which on one may be allocated ahead"""


class RoundRobin:
    """Selects each sequence about once in `period` steps."""

    __slots__ = ("_next", "_period")

    def __init__(self, period: int) -> None:
        self._period, self._next = period, 0

    def take(self, running: list[Sequence]) -> list[Sequence]:
        """The sequences of this step."""
        begin = self._next if self._next < len(running) else 0
        self._next = begin + len(running) // self._period + 1
        return running[begin : self._next]


class CacheHousekeeping:
    """Registers filled blocks in the prefix cache and, where many are free, allocates the next block ahead, so that
    sequences do not all need one in the same step."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._growing, self._hashing = RoundRobin(cache.block_tokens), RoundRobin(_HASHED_AT_ONCE * cache.block_tokens)

    def step(self, running: list[Sequence]) -> None:
        """The work of one step."""
        cache = self._cache
        for seq in self._hashing.take(running):
            cache.register_blocks(seq)
        if cache.pool.num_free > _PLENTY * len(running) * len(cache.groups):
            growing = self._growing.take(running)
            cache.extend([seq for seq in growing if seq.needs_block(ahead=cache.block_tokens)])
