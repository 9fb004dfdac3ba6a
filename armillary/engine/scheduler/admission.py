"""Admission: the batching modes, and enough free blocks that running sequences are seldom preempted.

A share of the blocks that running sequences are likely to need is kept free. Two quantities are learnt: the output
length, from finished sequences (many requests set no limit); the share, which rises with every preemption and falls
while there is none (SGLang's new-token ratio is the same idea).
"""

from armillary.engine.cache.kv_cache import KVCache
from armillary.engine.cache.prefix_lookup import probe
from armillary.engine.request.sequence import Sequence
from armillary.engine.scheduler.settings import Settings

_FIRST, _LEAST, _RISE, _FALL = 0.5, 0.1, 0.25, 0.995
_TYPICAL_TOKENS, _BELIEVED, _MEMORY = 512.0, 8, 64
"""output length before any is known, the number of outputs that this counts for, and the most that count"""


class Admission:
    """Decides whether the first sequence of the queue may start now."""

    def __init__(self, settings: Settings, cache: KVCache) -> None:
        self._settings = settings
        self._cache = cache
        self.learns = settings.batching == "continuous" and settings.reserve is None
        """else `reserve` is constant, a share of the most that sequences may grow"""
        self.reserve = _FIRST if settings.reserve is None else settings.reserve
        if settings.batching != "continuous":
            self.reserve = 1.0  # a batch stays together
        self.typical_tokens = _TYPICAL_TOKENS
        self._seen = _BELIEVED
        self._open = True

    def begin_step(self, *, preempted: bool) -> None:
        """Adapt the reserve."""
        if self.learns:
            self.reserve = min(1.0, self.reserve + _RISE) if preempted else max(_LEAST, self.reserve * _FALL)

    def ended(self, seq: Sequence) -> None:
        """Learn the output length from a finished sequence."""
        self._seen = min(_MEMORY, self._seen + 1)
        self.typical_tokens += (seq.num_output - self.typical_tokens) / self._seen

    def open_batch(self, num_running: int, num_waiting: int, oldest: float, now: float) -> None:
        """Once per step: whether requests may start in it. A static batch starts when the one before has ended, a
        dynamic one when it is full or its first request has waited for the window."""
        settings = self._settings
        window_s = settings.batch_window_s if settings.batching == "dynamic" else 0.0
        full = num_waiting >= settings.max_running or now >= oldest + window_s
        self._open = settings.batching == "continuous" or (full and not num_running)

    def lets_in(self, seq: Sequence, running: list[Sequence]) -> bool:
        """Whether the batching mode admits this sequence: siblings of running ones always, others while a batch is
        open."""
        if self._settings.batching == "continuous" or any(other.request is seq.request for other in running):
            return True
        return self._open and not (self._settings.batching == "none" and running)

    def fits(self, seq: Sequence, running: list[Sequence]) -> bool:
        """Whether its tokens fit beside the blocks that running sequences need and are likely to need."""
        growth, prompts = self._growth(), [other for other in running if other.is_prefilling]
        left = self._cache.available - self._needed(seq)
        left -= sum(max(0, other.blocks_at_start - other.num_blocks) for other in prompts)
        if left >= self.reserve * growth * (len(running) + 1):
            return True  # enough for every sequence to grow as far as it may
        likely = min(growth, seq.blocks_at_limit - seq.blocks_at_start)
        for other in running:
            likely += min(growth, max(0, other.blocks_at_limit - max(other.num_blocks, other.blocks_at_start)))
        return left >= self.reserve * likely

    def _growth(self) -> int:
        """Most blocks by which a sequence grows from here on, whatever its length so far."""
        if not self.learns:
            return self._cache.num_blocks
        return len(self._cache.groups) * int(1 + self.typical_tokens / self._cache.block_tokens)

    def _needed(self, seq: Sequence) -> int:
        """Blocks that are not in the cache already: for a fork, the one it continues in and a copy for its leader."""
        return 2 * len(self._cache.groups) if seq.can_fork else seq.blocks_at_start - probe(self._cache, seq)
