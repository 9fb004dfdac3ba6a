"""Hashes of blocks for the prefix cache, over their tokens and all tokens before, and maps from hashes to numbers.

The hashes of a prompt are computed once, when it is submitted; those of the output follow block by block.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from hashlib import blake2b

Digest = Callable[[bytes, bytes], bytes]  # (digest of the block before, tokens of this block) -> digest of this block


def digest(parent: bytes, chunk: bytes) -> bytes:
    """128 bits of BLAKE2b: the same in every process, so that routers can use it."""
    return blake2b(parent + chunk, digest_size=16).digest()


def root(salt: str = "", adapter: str = "") -> bytes:
    """Parent of the first block: requests with another salt or adapter never share blocks."""
    return blake2b(f"{len(salt)}:{salt}:{adapter}".encode(), digest_size=16).digest()


class Chain:
    """Tokens and digests of a sequence's full blocks, in order."""

    __slots__ = ("_block_tokens", "_digest", "chunks", "digests", "root")

    def __init__(self, root: bytes, block_tokens: int, digest: Digest = digest) -> None:
        self.root = root
        self.chunks: list[bytes] = []  # tokens of each block, 4 bytes each, to verify hits
        self.digests: list[bytes] = []
        self._block_tokens = block_tokens
        self._digest = digest

    def __len__(self) -> int:
        return len(self.digests)

    def parent(self, index: int) -> bytes:
        """Digest of the block before block `index`."""
        return self.digests[index - 1] if index else self.root

    def extend(self, tokens: list[int], num_known: int) -> None:
        """Hash the blocks that the first `num_known` tokens fill and that are not hashed yet."""
        size, digests = self._block_tokens, self.digests
        done = len(digests)
        num_new = num_known // size - done
        if num_new <= 0:
            return
        data = array("I", tokens[done * size : (done + num_new) * size]).tobytes()
        name = digests[-1] if done else self.root
        width = len(data) // num_new
        for start in range(0, len(data), width):
            chunk = data[start : start + width]
            name = self._digest(name, chunk)
            self.chunks.append(chunk)
            digests.append(name)

    def copy(self) -> Chain:
        chain = Chain(self.root, self._block_tokens, self._digest)
        chain.chunks, chain.digests = self.chunks.copy(), self.digests.copy()
        return chain


_PARTS = 256
_ENTRIES = 256  # expected in a part: with fewer blocks there are fewer parts


class DigestMap:
    """A dictionary in parts; `part(key)` is the one that has the key, if any has. A dictionary that has to grow copies
    itself, which at a hundred thousand entries takes milliseconds; each of many small ones takes microseconds, and at
    different times."""

    __slots__ = ("mask", "parts")

    def __init__(self, expected: int) -> None:
        count = min(_PARTS, 1 << (expected // _ENTRIES).bit_length())
        self.mask = count - 1
        self.parts: list[dict[bytes, int]] = [{} for _ in range(count)]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __contains__(self, key: bytes) -> bool:
        return key in self.parts[hash(key) & self.mask]

    def part(self, key: bytes) -> dict[bytes, int]:
        return self.parts[hash(key) & self.mask]

    def get(self, key: bytes) -> int:
        """The number of a key, or 0."""
        return self.parts[hash(key) & self.mask].get(key, 0)

    def count(self, key: bytes, more: int) -> None:
        """Add to a key's number; at 0 the key is removed."""
        part = self.parts[hash(key) & self.mask]
        part[key] = part.get(key, 0) + more
        if not part[key]:
            del part[key]

    def clear(self) -> None:
        for part in self.parts:
            part.clear()

    def plain(self) -> dict[bytes, int]:
        """All entries as one dictionary."""
        return {key: number for part in self.parts for key, number in part.items()}
