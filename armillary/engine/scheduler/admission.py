"""Who may start: the batching modes, and enough free blocks that running answers seldom have to be put back.

Of the blocks that running answers are likely to need, a share is kept free. Both are learnt: how long answers get, from
those that ended (many requests name no limit of their own); the share rises when a request has to be put back and
falls while none is (SGLang's new-token ratio is the same idea).
"""

from __future__ import annotations

from armillary.engine.cache.kv_cache import KVCache
from armillary.engine.cache.prefix_lookup import probe
from armillary.engine.request.sequence import Sequence
from armillary.engine.scheduler.settings import Settings

_FIRST, _LEAST, _RISE, _FALL = 0.5, 0.1, 0.25, 0.995
_TYPICAL_TOKENS, _BELIEVED, _MEMORY = 512.0, 8, 64
"""length of an answer before any is known, as many answers as that counts for, and how many count at most"""


class Admission:
    """Whether the first in the queue may start now."""

    def __init__(self, settings: Settings, cache: KVCache) -> None:
        self._settings = settings
        self._cache = cache
        self.learns = settings.batching == "continuous" and settings.reserve is None
        """else `reserve` stays, and is of all that answers may grow"""
        self.reserve = _FIRST if settings.reserve is None else settings.reserve
        if settings.batching != "continuous":
            self.reserve = 1.0  # a batch that was put together stays together
        self.typical_tokens = _TYPICAL_TOKENS
        """how long answers get, about"""
        self._seen = _BELIEVED
        self._open = True

    def begin_step(self, *, preempted: bool) -> None:
        """Learn from a step."""
        if self.learns:
            self.reserve = min(1.0, self.reserve + _RISE) if preempted else max(_LEAST, self.reserve * _FALL)

    def ended(self, seq: Sequence) -> None:
        """Learn from an answer that came to its end."""
        self._seen = min(_MEMORY, self._seen + 1)
        self.typical_tokens += (seq.num_output - self.typical_tokens) / self._seen

    def open_batch(self, num_running: int, num_waiting: int, oldest: float, now: float) -> None:
        """Once a step: may requests start in it? Static batches start when the one before is over, dynamic ones
        when they are full or the first has waited for the window."""
        mode = self._settings.batching
        if mode == "continuous":
            self._open = True
        elif mode == "dynamic":
            full = num_waiting >= self._settings.max_running
            self._open = not num_running and (full or now >= oldest + self._settings.batch_window_s)
        else:
            self._open = not num_running

    def lets_in(self, seq: Sequence, running: list[Sequence]) -> bool:
        """Whether the batching mode takes this one: members of what runs always, others while a batch is open."""
        if self._settings.batching == "continuous" or any(other.request is seq.request for other in running):
            return True
        return self._open and not (self._settings.batching == "none" and running)

    def fits(self, seq: Sequence, running: list[Sequence]) -> bool:
        """Whether all its tokens find room beside what the running ones need, and are likely to."""
        growth, prompts = self._growth(), [other for other in running if other.is_prefilling]
        left = self._cache.available - self._needed(seq)
        left -= sum(max(0, other.blocks_at_start - other.held) for other in prompts)
        if left >= self.reserve * growth * (len(running) + 1):
            return True  # there is so much that nobody need be asked
        likely = min(growth, seq.blocks_at_limit - seq.blocks_at_start)
        for other in running:
            likely += min(growth, max(0, other.blocks_at_limit - max(other.held, other.blocks_at_start)))
        return left >= self.reserve * likely

    def _growth(self) -> int:
        """Blocks that an answer grows by from here on, at most. How long it is already says little about it."""
        if not self.learns:
            return self._cache.num_blocks
        return len(self._cache.groups) * int(1 + self.typical_tokens / self._cache.block_tokens)

    def _needed(self, seq: Sequence) -> int:
        """Blocks that are not there already: of a fork, the one it goes on in and a copy for its leader."""
        return 2 * len(self._cache.groups) if seq.can_fork else seq.blocks_at_start - probe(self._cache, seq)
