"""Which replica has seen which beginnings of prompts: an approximate index, bounded in size.

A prompt is cut into blocks of 128 bytes; each block is known by a hash of everything up to its end, as engines know
their KV blocks. The index maps such a hash to the replicas that were sent a prompt with it; those unused
for longest are dropped.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator
from hashlib import blake2b

BLOCK = 128
MOST_BLOCKS = 512
"""blocks of a prompt that count: 64 kB"""


class PrefixIndex:
    """Hash of a prefix -> names of replicas."""

    def __init__(self, capacity: int = 200_000) -> None:
        self._capacity = capacity
        self._replicas: OrderedDict[bytes, frozenset[str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._replicas)

    def add(self, prompt: bytes, replica: str) -> None:
        """A prompt was sent to a replica."""
        for digest in prefixes(prompt):
            known = self._replicas.get(digest, frozenset())
            if replica not in known:
                self._replicas[digest] = known | {replica}
            self._replicas.move_to_end(digest)
        while len(self._replicas) > self._capacity:
            self._replicas.popitem(last=False)

    def match(self, prompt: bytes, among: Collection[str]) -> dict[str, int]:
        """Replica -> blocks of the prompt's beginning that it has seen, of the replicas that have seen any."""
        matched: dict[str, int] = {}
        left = set(among)
        for number, digest in enumerate(prefixes(prompt), start=1):
            left &= self._replicas.get(digest, frozenset())
            if not left:
                break
            for name in left:
                matched[name] = number
        return matched

    def forget(self, replica: str) -> None:
        """A replica has restarted with an empty cache."""
        for digest, names in list(self._replicas.items()):
            if replica in names:
                self._replicas[digest] = names - {replica}


def prefixes(prompt: bytes) -> Iterator[bytes]:
    """A hash per complete block, of everything up to its end."""
    running = blake2b(digest_size=8)
    for start in range(0, min(len(prompt), MOST_BLOCKS * BLOCK) - BLOCK + 1, BLOCK):
        running.update(prompt[start : start + BLOCK])
        yield running.digest()
