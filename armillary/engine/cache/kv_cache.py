"""The KV-cache manager: block tables of sequences, over one pool of blocks and one prefix cache, and its housekeeping.

It moves no data: what the executor has to do is left in `table_updates` (block-table entries) and `copies` (blocks),
which go out with the next decision. The work per step is bounded: long tables are searched and freed in slices.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, NamedTuple

from armillary.engine.cache.block_hash import Chain, Digest, digest, root
from armillary.engine.cache.block_pool import NULL, BlockPool
from armillary.engine.cache.layer_groups import FULL_ATTENTION, Group
from armillary.engine.cache.prefix_cache import PrefixCache
from armillary.engine.request.sequence import Sequence

if TYPE_CHECKING:
    from armillary.engine.cache.kv_offload import KVOffload

_AT_ONCE = 256  # blocks freed at once; longer tables are freed in slices
_SAMPLED = 16  # every so many blocks of a long table, one is checked for other holders


class TableUpdate(NamedTuple):
    """Changed entries of a block table."""

    row: int
    group: int
    first: int
    blocks: list[int]


class Copy(NamedTuple):
    """A block to copy: it is read before the step writes anything. −h is block h in host memory (kv_offload)."""

    source: int
    target: int


class KVCache:
    """Blocks of every sequence."""

    def __init__(
        self,
        num_blocks: int,
        block_tokens: int = 16,
        *,
        groups: Items[Group] = FULL_ATTENTION,
        prefix: bool = True,
        has_states: bool = False,
        step_tokens: int = 2048,
        digest: Digest = digest,
    ) -> None:
        """`has_states`: rows have recurrent states beside their blocks. These are of a sequence's last token only, so
        that computed tokens are neither shared with others nor computed again."""
        assert not (prefix and has_states), "blocks do not hold recurrent states"
        self.block_tokens = block_tokens
        self.groups = tuple(groups)
        self.step_tokens = step_tokens
        self.prefix, self.has_states = prefix, has_states
        self.pool = BlockPool(num_blocks)
        self.prefix_cache = PrefixCache(self.pool, len(self.groups))
        self.table_updates: list[TableUpdate] = []
        self.copies: list[Copy] = []  # one after the other
        self.offload: KVOffload | None = None  # blocks in host memory
        self.freeing: deque[list[int]] = deque()  # tables that are being freed, from their ends
        self._freeing_own = 0
        self.digest = digest
        self.full_groups = [g for g, group in enumerate(self.groups) if group.sees == "all"]
        self.window_groups = [g for g, group in enumerate(self.groups) if group.sees != "all"]

    # --- sizes

    @property
    def num_blocks(self) -> int:
        """Usable blocks, without the null block."""
        return self.pool.num_blocks - 1

    @property
    def available(self) -> int:
        """Free blocks, about: blocks of tables that are being freed may still be shared."""
        return self.pool.num_free + max(0, self._freeing_own)

    @property
    def used_fraction(self) -> float:
        return 1 - min(self.available, self.num_blocks) / self.num_blocks

    @property
    def capacity_tokens(self) -> int:
        """Tokens that fit while no window is full."""
        return self.num_blocks // len(self.groups) * self.block_tokens

    def blocks_at(self, tokens: int) -> int:
        """Most blocks that one sequence of `tokens` holds, all groups together."""
        return sum(group.blocks_at(tokens, self.block_tokens, self.step_tokens) for group in self.groups)

    def longest(self, tokens: int) -> int:
        """Length of the longest sequence, `tokens` at most, that fits an empty cache."""
        if self.blocks_at(tokens) <= self.num_blocks:
            return tokens
        return bisect_right(range(tokens + 1), self.num_blocks, key=self.blocks_at) - 1

    def chain(self, tokens: list[int], salt: str = "", adapter: str = "") -> Chain:
        """Hash chain of a prompt's blocks, made when it is submitted, outside the steps."""
        chain = Chain(root(salt, adapter), self.block_tokens, self.digest)
        if self.prefix:
            chain.extend(tokens, len(tokens))
        return chain

    # --- a sequence starts and grows

    def start(self, seq: Sequence) -> None:
        """Empty tables; `match` and `grow` fill them."""
        seq.forget_blocks(len(self.groups))
        seq.matching = self.prefix and not seq.request.params.needs_every_token
        if not seq.matching:
            seq.miss = seq.miss or "off"

    def grow(self, seq: Sequence, upto: int) -> bool:
        """Allocate blocks for the tokens below `upto` and make the next written block exclusive; False where there are
        too few."""
        size, tables, pool = self.block_tokens, seq.tables, self.pool
        have, first = len(tables[0]), seq.computed // size
        if self.window_groups:
            self._free_windows(seq)
        num_new = -(-upto // size) - have
        if num_new < 0:
            num_new = 0
        shared = [g for g, table in enumerate(tables) if pool.refs[table[first]] > 1] if first < have else []
        wanted = num_new * len(tables) + len(shared)
        if wanted > pool.num_free and not self._make_free(wanted):
            return False
        if shared or (self.prefix and first < have):
            self._own(seq, first, shared)
        if num_new:
            for g, table in enumerate(tables):
                fresh = pool.allocate(num_new)
                table += fresh
                self.table_updates.append(TableUpdate(seq.row, g, have, fresh))
            seq.num_blocks += num_new * len(tables)
        self._set_room(seq)
        return True

    def extend(self, full: list[Sequence]) -> None:
        """One more block for each of these sequences: `grow` for many together. There must be as many free blocks."""
        groups, updates = len(self.groups), self.table_updates
        if self.window_groups:
            for seq in full:
                self._free_windows(seq)
        fresh = self.pool.allocate(len(full) * groups)
        for seq in full:
            row, have = seq.row, len(seq.tables[0])
            for g, table in enumerate(seq.tables):
                block = fresh.pop()
                table.append(block)
                updates.append(TableUpdate(row, g, have, [block]))
            seq.num_blocks += groups
            self._set_room(seq)

    def _set_room(self, seq: Sequence) -> None:
        seq.num_writable = capacity = len(seq.tables[0]) * self.block_tokens
        if seq.constraint is None:
            most = seq.limit - 2
            seq.num_allocated = capacity if capacity < most else most

    def _own(self, seq: Sequence, index: int, shared: list[int]) -> None:
        """Copy on write: other holders keep the old block, and the prefix cache forgets the one that is written."""
        for g, table in enumerate(seq.tables):
            block = table[index]
            if g in shared:
                (target,) = self.pool.allocate(1)
                self.copies.append(Copy(block, target))
                self.pool.release([block])
                table[index] = target
                self.table_updates.append(TableUpdate(seq.row, g, index, [target]))
            elif self.pool.hashed[block]:
                self.prefix_cache.forget(block)

    def register_blocks(self, seq: Sequence) -> None:
        """Add the full, computed blocks of known tokens to the prefix cache."""
        full = min(seq.computed, len(seq.tokens)) // self.block_tokens
        first = seq.num_hashed
        if full <= first or not self.prefix:
            return
        seq.chain.extend(seq.tokens, full * self.block_tokens)
        for g, table in enumerate(seq.tables):
            self.prefix_cache.add(table[first:full], g, seq.chain, first)
        seq.num_hashed = full

    def _free_windows(self, seq: Sequence) -> None:
        """Free blocks that no query from `computed` on reads."""
        for g in self.window_groups:
            table, start = seq.tables[g], seq.windows[g]
            end = min(len(table), self.groups[g].first_needed(seq.computed) // self.block_tokens)
            if end <= start:
                continue
            freed = [block for block in table[start:end] if block]
            freed.reverse()
            self.pool.release(freed)
            table[start:end] = nothing = [NULL] * (end - start)
            seq.windows[g] = end
            seq.num_blocks -= len(freed)
            self.table_updates.append(TableUpdate(seq.row, g, start, nothing))

    def fork(self, leader: Sequence, seq: Sequence) -> bool:
        """Share the leader's blocks of the prompt but for its last token, which every sequence computes for itself;
        False where the leader does not hold them."""
        if self.has_states:
            return False
        shared = seq.num_prompt - 1
        count = -(-shared // self.block_tokens)
        firsts = [group.first_needed(shared) // self.block_tokens for group in self.groups]
        if any(leader.windows[g] > first for g, first in enumerate(firsts)):
            return False
        for g, first in enumerate(firsts):
            first, table = min(first, count), leader.tables[g][:count]
            table[:first] = [NULL] * first
            self.pool.add_holder(table[first:] if first else table)
            seq.tables[g], seq.windows[g] = table, first
            seq.num_blocks += count - first
            if table:
                self.table_updates.append(TableUpdate(seq.row, g, 0, table.copy()))
        seq.computed, seq.matching = shared, False
        seq.num_hashed = min(leader.num_hashed, shared // self.block_tokens)
        leader.num_allocated = leader.num_writable = 0  # the next block that it writes may be shared now
        return True

    # --- a sequence ends

    def free(self, seq: Sequence, *, spoiled: bool = False) -> None:
        """Free all blocks, the last first; the prefix cache forgets those of a `spoiled` sequence."""
        if not spoiled:
            self.register_blocks(seq)
        for table in seq.tables:
            for block in table if spoiled else ():
                if self.pool.hashed[block]:
                    self._disown(block)
            self.free_table(table)
        seq.forget_blocks(len(self.groups))

    def _disown(self, block: int) -> None:
        """A block of the prefix cache is invalid, and so is a copy in host memory."""
        if self.offload is not None:
            self.offload.forget(self.prefix_cache.groups[block], self.prefix_cache.digests[block])
        self.prefix_cache.forget(block)

    def free_table(self, table: list[int]) -> None:
        """Free a table's blocks, its last first; a long table in slices."""
        if len(table) > _AT_ONCE:
            self.freeing.append(table)
            asked = [self.pool.refs[block] for block in table[::_SAMPLED]]
            self._freeing_own += len(table) * asked.count(1) // len(asked)
        else:
            self._release(table, len(table))

    def free_some(self, most: int) -> None:
        """Free up to `most` blocks of the tables that are being freed."""
        while most > 0 and self.freeing:
            table = self.freeing[0]
            count = min(most, len(table))
            self._freeing_own -= self._release(table, count)
            most -= count
            if not table:
                self.freeing.popleft()
        if not self.freeing:
            self._freeing_own = 0  # blocks shared or reused meanwhile were miscounted

    def invalidate_all(self) -> None:
        """Blocks and the executor's tables may hold anything: forget all hashes and pending updates."""
        self.prefix_cache.clear()
        if self.offload is not None:
            self.offload.clear()
        self.table_updates.clear()
        self.copies.clear()

    def _make_free(self, count: int) -> bool:
        while self.pool.num_free < count and self.freeing:
            self.free_some(max(32, count - self.pool.num_free))
        return self.pool.num_free >= count

    def _release(self, table: list[int], count: int) -> int:
        before = self.pool.num_free
        freed = [block for block in table[len(table) - count :] if block]
        del table[len(table) - count :]
        freed.reverse()
        self.pool.release(freed)
        return self.pool.num_free - before


_HASHED_AT_ONCE = 4  # blocks that a sequence fills, about, before they are hashed: together they take less time
_PLENTY = 4  # free blocks per running sequence from which on one may be allocated ahead


class RoundRobin:
    """Selects each sequence about once in `period` steps."""

    __slots__ = ("_next", "_period")

    def __init__(self, period: int) -> None:
        self._period, self._next = period, 0

    def take(self, running: list[Sequence]) -> list[Sequence]:
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
        cache = self._cache
        if cache.prefix:
            for seq in self._hashing.take(running):
                cache.register_blocks(seq)
        if cache.pool.num_free > _PLENTY * len(running) * len(cache.groups):
            growing = self._growing.take(running)
            full = [seq for seq in growing if seq.needs_block(ahead=cache.block_tokens)]
            if full:
                cache.extend(full)
