"""Prefix reuse: which prompts share a prefix with earlier requests, whether or not the prefix cache has the blocks.

Digests of recent blocks are kept with the number of the last request that had them. So a request's record says how much
of its prompt came before, and in which request: enough to simulate the same requests with another cache. The work is
done when a request is submitted, outside the steps; memory is bounded by dropping the older half.
"""

import threading
from collections import deque

from armillary.engine.cache.block_hash import DigestMap
from armillary.engine.request.sequence import Sequence

_CAPACITY = 65_536  # least blocks that are remembered: a million tokens in blocks of 16
_MOST_BLOCKS = 4096  # most blocks of one sequence
_ENDED = 64  # finished sequences that wait to be added


class PrefixReuse:
    """Prefixes, and the last request that had each."""

    def __init__(self, capacity: int = _CAPACITY) -> None:
        """`capacity`: least blocks that are remembered; 0: requests are only numbered, and share nothing."""
        self._capacity = capacity
        self._young, self._old = DigestMap(capacity), DigestMap(capacity)
        self._new = 0  # entries since the older half was dropped
        self._ended: deque[Sequence] = deque(maxlen=_ENDED)
        self._count = 0
        self._alone = threading.Lock()  # requests are prepared in any thread

    def see(self, sequences: list[Sequence], block_tokens: int) -> None:
        """Number a request's sequences, and set the prefix that it shares with earlier ones."""
        first = sequences[0]
        with self._alone:
            while self._ended:
                over = self._ended.popleft()
                self._keep(over, len(over.tokens))
            self._count += 1
            for seq in sequences:
                seq.number = self._count
            if not self._capacity:
                return
            first.chain.extend(first.tokens, first.num_prompt)
            findable = (first.num_prompt - 1) // block_tokens  # a prompt's last token is always computed
            num_blocks, owner = self._find(first.chain.digests[:findable])
            first.shared_prefix, first.prefix_source = num_blocks * block_tokens, owner
            self._keep(first, first.num_prompt)

    def ended(self, seq: Sequence) -> None:
        """A sequence has ended: later prompts may continue it. It is added with the next request."""
        if self._capacity:
            self._ended.append(seq)

    def _find(self, digests: list[bytes]) -> tuple[int, int]:
        """(blocks that were seen, number of the last request that had them all)."""
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
        if self._new > self._capacity:
            self._young, self._old, self._new = DigestMap(self._capacity), self._young, 0
