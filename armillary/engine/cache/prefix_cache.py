"""The prefix cache: a dictionary from hash chains to computed blocks that can be shared.

A digest is never trusted alone: tokens and parent are compared, so a collision costs a miss and no wrong output.
Evicted digests are remembered for a while, so that a miss can be explained.
"""

from collections.abc import Callable
from typing import Literal

from armillary.engine.cache.block_hash import Chain, DigestMap
from armillary.engine.cache.block_pool import NULL, BlockPool

Miss = Literal["off", "short", "partial", "cold", "salt", "evicted", "diverged", "extends"]
MEANING: dict[Miss, str] = {
    "off": "the prefix cache is off, or the request wants logprobs of its prompt",
    "short": "the prompt fills no block before its last token, which is always computed",
    "partial": "every full block was found; only the last, incomplete one is computed",
    "cold": "no request began like this",
    "salt": "a request with another salt or adapter began like this",
    "evicted": "the next block was cached and evicted",
    "diverged": "another text continues here",
    "extends": "nothing was computed beyond here yet",
}

_GHOSTS = 32_768  # most evicted blocks that are remembered, where the cache has no more blocks


class PrefixCache:
    """Hashed blocks of all layer groups. Hashes are stored in columns with one entry per block: an object per block
    would keep the garbage collector busy."""

    def __init__(self, pool: BlockPool, num_groups: int) -> None:
        self._pool = pool
        pool.evict = self._evicted
        self.on_evict: Callable[[int], None] | None = None
        """called with each block that is about to be evicted (kv_offload)"""
        self.by_digest = [DigestMap(pool.num_blocks) for _ in range(num_groups)]  # per layer group: digest -> block
        # of each hashed block: its digest, the digest of the block before, its tokens
        self.digests, self.parents, self.chunks = ([b""] * pool.num_blocks for _ in range(3))
        self.groups = bytearray(pool.num_blocks)  # layer group of each hashed block
        self.first = bytearray(pool.num_blocks)  # 1 for hashed blocks at the beginning of a prompt
        self.num_hashed = 0
        self.children = DigestMap(pool.num_blocks)  # digest -> hashed blocks that continue it (first group)
        self.beginnings = DigestMap(pool.num_blocks)  # tokens of first blocks, whatever their salt (first group)
        self.ghosts = DigestMap(pool.num_blocks)  # recently evicted digests, oldest first in each part (first group)
        self.num_ghosts = 0
        capacity = max(pool.num_blocks, min(_GHOSTS, 8 * pool.num_blocks))  # a small cache would forget too soon
        self._most_ghosts = -(-capacity // len(self.ghosts.parts))  # of a part

    def __len__(self) -> int:
        return self.num_hashed

    def of(self, chain: Chain, group: int, index: int) -> int:
        """The block with block `index` of a chain, or 0."""
        return self.find(group, chain.digests[index], chain.parent(index), chain.chunks[index])

    def find(self, group: int, digest: bytes, parent: bytes, chunk: bytes) -> int:
        """The block with these tokens after this parent, or 0."""
        block = self.by_digest[group].get(digest)
        return block if self.chunks[block] == chunk and self.parents[block] == parent else NULL

    def add(self, blocks: list[int], group: int, chain: Chain, index: int) -> None:
        """Add computed blocks, from the chain's block `index` on; of two equal blocks the first is kept."""
        by_digest, hashed = self.by_digest[group], self._pool.hashed
        for place, block in enumerate(blocks, index):
            digest = chain.digests[place]
            part = by_digest.parts[hash(digest) & by_digest.mask]
            if not block or digest in part or hashed[block]:
                continue
            self.put(block, group, digest, chain.parent(place), chain.chunks[place], first=not place)

    def put(self, block: int, group: int, digest: bytes, parent: bytes, chunk: bytes, *, first: bool | int) -> None:
        """Add one block, whose digest no other has."""
        self.by_digest[group].part(digest)[digest] = block
        self.digests[block], self.parents[block], self.chunks[block] = digest, parent, chunk
        self.groups[block], self.first[block], self._pool.hashed[block] = group, bool(first), 1
        self.num_hashed += 1
        if not group:
            self._continues(parent, digest, chunk, first=bool(first))

    def _continues(self, parent: bytes, digest: bytes, chunk: bytes, *, first: bool) -> None:
        """Update what explains misses."""
        self.children.count(parent, 1)
        if self.num_ghosts and self.ghosts.part(digest).pop(digest, 0):
            self.num_ghosts -= 1
        if first:
            self.beginnings.count(chunk, 1)

    def _evicted(self, blocks: list[int]) -> None:
        for block in blocks:
            if self.on_evict is not None:
                self.on_evict(block)
            if not self.groups[block]:
                digest = self.digests[block]
                part = self.ghosts.part(digest)
                part[digest] = 1
                self.num_ghosts += 1
                if len(part) > self._most_ghosts:
                    del part[next(iter(part))]
                    self.num_ghosts -= 1
            self._forget(block)

    def _forget(self, block: int) -> None:
        assert self._pool.hashed[block], f"block {block} is not hashed"
        digest, group = self.digests[block], self.groups[block]
        del self.by_digest[group].part(digest)[digest]
        if not group:
            self.children.count(self.parents[block], -1)
            if self.first[block]:
                self.beginnings.count(self.chunks[block], -1)
        self.digests[block] = self.parents[block] = self.chunks[block] = b""
        self._pool.hashed[block] = 0
        self.num_hashed -= 1

    def forget(self, block: int) -> None:
        """Remove a block that will be written or whose content is invalid."""
        self._forget(block)
        self._pool.unhash(block)

    def clear(self) -> None:
        for block, hashed in enumerate(self._pool.hashed):
            if hashed:
                self.forget(block)
        self.ghosts.clear()
        self.num_ghosts = 0

    def why(self, digest: bytes, parent: bytes, chunk: bytes, *, first: bool) -> Miss:
        """Why there is no block with this digest."""
        if digest in self.ghosts:
            return "evicted"
        if first:
            return "salt" if chunk in self.beginnings else "cold"
        return "diverged" if parent in self.children else "extends"
