"""Which computed blocks can be shared: a dictionary from hash chains to blocks, with a look at the tokens.

A digest is never trusted alone: tokens and parent are compared, so a collision costs a miss and not a wrong answer.
What was evicted is remembered for a while, so that a miss can say why it was one.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Literal

from armillary.serving.engine.block_pool import NULL, BlockPool

Miss = Literal["off", "short", "partial", "cold", "salt", "evicted", "diverged", "extends"]
MEANING: dict[Miss, str] = {
    "off": "the prefix cache is off, or the request wants logprobs of its prompt",
    "short": "the prompt fills no block before its last token, which is always computed",
    "partial": "every full block was found; only the last, incomplete one is computed",
    "cold": "no request began like this",
    "salt": "a request with another salt or adapter began like this",
    "evicted": "the next block was cached and had to make room",
    "diverged": "another text continues here",
    "extends": "nothing was computed beyond here yet",
}


class PrefixCache:
    """Named blocks of all layer groups. What a name is made of stands in columns, a place a block: as many objects as
    there are blocks would keep the garbage collector busy."""

    def __init__(self, pool: BlockPool, num_groups: int) -> None:
        self._pool = pool
        pool.evict = self._evicted
        self.found: list[dict[bytes, int]] = [{} for _ in range(num_groups)]
        """for each group of layers: digest -> block"""
        self.digests, self.parents, self.chunks = ([b""] * pool.num_blocks for _ in range(3))
        """of each named block: its digest, that of the block before, its tokens"""
        self.groups = bytearray(pool.num_blocks)
        """group of layers each named block belongs to"""
        self.first = bytearray(pool.num_blocks)
        """1 for named blocks that begin a prompt"""
        self.num_named = 0
        self.children: dict[bytes, int] = {}
        """digest -> named blocks that continue it (first group)"""
        self.beginnings: dict[bytes, int] = {}
        """tokens of first blocks, whatever their salt (first group)"""
        self.ghosts: OrderedDict[bytes, None] = OrderedDict()
        """digests evicted lately, oldest first (first group)"""

    def __len__(self) -> int:
        return self.num_named

    def find(self, group: int, digest: bytes, parent: bytes, chunk: bytes) -> int:
        """The block that holds these tokens after these, or 0."""
        block = self.found[group].get(digest, NULL)
        return block if self.chunks[block] == chunk and self.parents[block] == parent else NULL

    def add(self, block: int, group: int, digest: bytes, parent: bytes, chunk: bytes, first: bool) -> None:
        """Give a computed block its name; of two alike the first keeps it."""
        found, named = self.found[group], self._pool.named
        if digest in found or named[block]:
            return
        found[digest] = block
        self.digests[block], self.parents[block], self.chunks[block] = digest, parent, chunk
        self.groups[block], self.first[block] = group, first
        named[block] = 1
        self.num_named += 1
        if not group:
            self.children[parent] = self.children.get(parent, 0) + 1
            if digest in self.ghosts:
                del self.ghosts[digest]
            if first:
                self.beginnings[chunk] = self.beginnings.get(chunk, 0) + 1

    def _evicted(self, block: int) -> None:
        digest = self.digests[block]
        self._forget(block)
        if not self.groups[block]:
            self.ghosts[digest] = None
            if len(self.ghosts) > self._pool.num_blocks:
                self.ghosts.popitem(last=False)

    def _forget(self, block: int) -> None:
        assert self._pool.named[block], f"block {block} has no name to forget"
        del self.found[self.groups[block]][self.digests[block]]
        if not self.groups[block]:
            _less(self.children, self.parents[block])
            if self.first[block]:
                _less(self.beginnings, self.chunks[block])
        self.digests[block] = self.parents[block] = self.chunks[block] = b""
        self._pool.named[block] = 0
        self.num_named -= 1

    def forget(self, block: int) -> None:
        """The block will be written, or what is in it is not to be trusted."""
        self._forget(block)
        self._pool.lose_name(block)

    def clear(self) -> None:
        """Forget every name."""
        for block, named in enumerate(self._pool.named):
            if named:
                self.forget(block)
        self.ghosts.clear()

    def why(self, digest: bytes, parent: bytes, chunk: bytes, *, first: bool) -> Miss:
        """Why there is no block of this name."""
        if digest in self.ghosts:
            return "evicted"
        if first:
            return "salt" if chunk in self.beginnings else "cold"
        return "diverged" if parent in self.children else "extends"


def _less(counts: dict[bytes, int], key: bytes) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]
