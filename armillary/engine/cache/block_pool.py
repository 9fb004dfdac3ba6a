"""The blocks of the KV cache: reference counts, and the order in which free blocks are reused.

Free blocks are in a doubly linked list threaded through two arrays, so taking, returning and removing one from the
middle are O(1). Blocks without a hash go to the front; hashed ones (see prefix_cache) to the back, so that they are
evicted last, least recently used first. Block 0 is never allocated: tables point to it where nothing is needed.
"""

from collections.abc import Callable, Iterator

NULL = 0


class BlockPool:
    """Reference counts and the list of free blocks."""

    __slots__ = ("_next", "_previous", "evict", "hashed", "num_blocks", "num_evicted", "num_free", "refs")

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 2, "a pool needs a block besides the null block"
        self.num_blocks = num_blocks
        self.refs = [0] * num_blocks  # number of tables that hold each block
        self.hashed = bytearray(num_blocks)  # 1 for blocks in the prefix cache: their content outlives the last holder
        self.num_free = num_blocks - 1
        self.num_evicted = 0
        self.evict: Callable[[list[int]], None] = _no_prefix_cache
        """called with hashed blocks that are about to be reused"""
        # index 0, the null block, is head and tail of the ring
        self._next = [*range(1, num_blocks), 0]
        self._previous = [num_blocks - 1, *range(num_blocks - 1)]

    @property
    def num_used(self) -> int:
        return self.num_blocks - 1 - self.num_free

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one holder each; as many must be free."""
        assert count <= self.num_free, f"asked for {count} blocks, {self.num_free} are free"
        follow, refs, hashed, blocks = self._next, self.refs, self.hashed, []
        block = follow[0]
        for _ in range(count):
            blocks.append(block)
            refs[block] = 1
            block = follow[block]
        follow[0] = block
        self._previous[block] = 0
        self.num_free -= count
        if count and hashed[blocks[-1]]:  # hashed ones come after the others
            evicted = [block for block in blocks if hashed[block]]
            self.num_evicted += len(evicted)
            self.evict(evicted)
        return blocks

    def share(self, blocks: list[int]) -> None:
        """One more holder for each; a free hashed block is taken out of the free list."""
        refs, follow, previous = self.refs, self._next, self._previous
        for block in blocks:
            holders = refs[block]
            refs[block] = holders + 1
            if not holders:
                before, after = previous[block], follow[block]
                follow[before] = after
                previous[after] = before
                self.num_free -= 1

    def add_holder(self, blocks: list[int]) -> None:
        """`share` for blocks that have holders: a fork takes those of a long prompt at once."""
        refs = self.refs
        for block in blocks:
            refs[block] += 1

    def release(self, blocks: list[int]) -> None:
        """One holder fewer for each; without holders, a block is free."""
        refs, hashed, follow, previous = self.refs, self.hashed, self._next, self._previous
        for block in blocks:
            left = refs[block] - 1
            assert left >= 0 and block, f"block {block} was freed twice"
            refs[block] = left
            if left:
                continue
            # at the end of the list where it is hashed, else at the front
            before = previous[0] if hashed[block] else 0
            after = follow[before]
            follow[before] = previous[after] = block
            previous[block], follow[block] = before, after
            self.num_free += 1

    def unhash(self, block: int) -> None:
        """The prefix cache forgot the block: if it is free, it is the first to be reused."""
        self.hashed[block] = 0
        if not self.refs[block]:
            self.share([block])
            self.release([block])

    def free_blocks(self) -> Iterator[int]:
        """In the order in which they will be reused."""
        block = self._next[0]
        while block:
            assert self._previous[self._next[block]] == block, f"the free list is torn after block {block}"
            yield block
            block = self._next[block]


def _no_prefix_cache(blocks: list[int]) -> None:
    raise AssertionError(f"blocks {blocks} are hashed and there is no prefix cache")
