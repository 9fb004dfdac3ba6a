"""Which prompts begin like earlier ones, whether or not the prefix cache is on, large enough, or had the blocks still.

Names of the blocks seen lately are kept with the number of the last request that had them, so that a request's record
says how much of it was there before, and where: enough to play the same requests again with another cache. All of it is
done when a request is submitted, outside the steps; memory is bounded by forgetting the older half.
"""

from __future__ import annotations

import threading
from collections import deque

from armillary.engine.cache.digest_map import DigestMap
from armillary.engine.request.sequence import Sequence

_KEPT = 65_536
"""blocks that are remembered at least: a million tokens in blocks of 16"""
_MOST_BLOCKS = 4096
"""of one text: what comes later is not looked at"""
_ENDED = 64
"""answers that wait to be looked at"""


class PrefixReuse:
    """Beginnings of texts, and who had them last."""

    def __init__(self, kept: int = _KEPT) -> None:
        self._kept = kept
        self._young, self._old = DigestMap(kept), DigestMap(kept)
        self._new = 0
        """entries made since the older half was forgotten"""
        self._ended: deque[Sequence] = deque(maxlen=_ENDED)
        self._count = 0
        self._alone = threading.Lock()
        """requests are prepared in any thread"""

    def see(self, sequences: list[Sequence], block_tokens: int) -> None:
        """Number a request's sequences, and note how much of its prompt an earlier text began with."""
        first = sequences[0]
        with self._alone:
            while self._ended:
                over = self._ended.popleft()
                self._keep(over, len(over.tokens))
            self._count += 1
            for seq in sequences:
                seq.number = self._count
            first.chain.extend(first.tokens, first.num_prompt)
            findable = (first.num_prompt - 1) // block_tokens  # a prompt's last token is always computed
            num_blocks, owner = self._find(first.chain.digests[:findable])
            first.shared_prefix, first.prefix_source = num_blocks * block_tokens, owner
            self._keep(first, first.num_prompt)

    def ended(self, seq: Sequence) -> None:
        """An answer is over: later prompts may go on from it. It is looked at with the next one."""
        self._ended.append(seq)

    def _find(self, digests: list[bytes]) -> tuple[int, int]:
        """(blocks that were seen, the number of the last request that had them all)."""
        num_blocks, owner = 0, 0
        for name in digests[:_MOST_BLOCKS]:
            number = self._young.get(name) or self._old.get(name)
            if not number:
                break
            num_blocks, owner = num_blocks + 1, number
        return num_blocks, owner

    def _keep(self, seq: Sequence, num_known: int) -> None:
        seq.chain.extend(seq.tokens, num_known)
        names = seq.chain.digests[:_MOST_BLOCKS]
        for name in names:
            self._young.part(name)[name] = seq.number
        self._new += len(names)
        if self._new > self._kept:
            self._young, self._old, self._new = DigestMap(self._kept), self._young, 0
