"""Blocks: handed out once, freed once, and reused in the right order."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from armillary.engine.cache.block_pool import NULL, BlockPool


def unname(pool: BlockPool, blocks: list[int]) -> None:
    for block in blocks:
        pool.hashed[block] = 0


def test_blocks_are_handed_out_once_and_never_the_null_block() -> None:
    pool = BlockPool(12)
    assert sorted(pool.allocate(11)) == list(range(1, 12)) and pool.num_free == 0
    with pytest.raises(AssertionError, match="asked for 1 blocks, 0 are free"):
        pool.allocate(1)


def test_a_block_freed_twice_is_noticed() -> None:
    pool = BlockPool(4)
    (block,) = pool.allocate(1)
    pool.release([block])
    with pytest.raises(AssertionError, match="freed twice"):
        pool.release([block])
    with pytest.raises(AssertionError, match="freed twice"):
        pool.release([NULL])


def test_a_shared_block_is_free_when_its_last_holder_goes() -> None:
    pool = BlockPool(4)
    (block,) = pool.allocate(1)
    pool.share([block])
    pool.release([block])
    assert pool.num_free == 2
    pool.release([block])
    assert pool.num_free == 3


def test_unnamed_blocks_are_reused_first_and_named_ones_least_recently_freed_first() -> None:
    pool, evicted = BlockPool(6), []
    pool.evict = lambda blocks: evicted.extend(blocks) or unname(pool, blocks)
    a, b, c, d, e = pool.allocate(5)
    for block in (a, b, c):
        pool.hashed[block] = 1
    for block in (b, d, a, e, c):
        pool.release([block])
    assert list(pool.free_blocks()) == [e, d, b, a, c]
    assert pool.allocate(4) == [e, d, b, a] and evicted == [b, a] and pool.num_evicted == 2


def test_a_named_block_comes_back_to_life_from_the_middle_of_the_list() -> None:
    pool = BlockPool(6)
    blocks = pool.allocate(5)
    for block in blocks:
        pool.hashed[block] = 1
        pool.release([block])
    pool.share([blocks[2]])
    assert list(pool.free_blocks()) == [blocks[0], blocks[1], blocks[3], blocks[4]]
    pool.release([blocks[2]])
    assert list(pool.free_blocks())[-1] == blocks[2]


class PoolMachine(RuleBasedStateMachine):
    """Any order of calls, against counts kept beside."""

    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(9)
        self.pool.evict = lambda blocks: unname(self.pool, blocks)
        self.holders: Counter[int] = Counter()

    @precondition(lambda self: self.pool.num_free)
    @rule(target=held, named=st.booleans())
    def allocate(self, named: bool) -> int:
        (block,) = self.pool.allocate(1)
        assert not self.holders[block] and block != NULL
        self.holders[block] += 1
        self.pool.hashed[block] = named
        return block

    @rule(target=held, block=held)
    def share(self, block: int) -> int:
        if not self.holders[block] and not self.pool.hashed[block]:
            self.pool.hashed[block] = 1
        self.pool.share([block])
        self.holders[block] += 1
        return block

    @rule(block=consumes(held))
    def release(self, block: int) -> None:
        if self.holders[block]:
            self.holders[block] -= 1
            self.pool.release([block])

    @rule(block=held)
    def unhash(self, block: int) -> None:
        self.pool.unhash(block)
        if not self.holders[block]:
            assert next(self.pool.free_blocks()) == block

    @invariant()
    def free_is_what_nobody_holds(self) -> None:
        free = list(self.pool.free_blocks())
        assert len(free) == len(set(free)) == self.pool.num_free
        assert set(free) == {block for block in range(1, 9) if not self.holders[block]}


PoolMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
test_any_order_of_calls = PoolMachine.TestCase


def test_a_hundred_thousand_operations_leave_nothing_allocated() -> None:
    dice, pool, held = random.Random(3), BlockPool(400), []
    pool.evict = lambda blocks: unname(pool, blocks)
    for _ in range(100_000):
        action = dice.random()
        if action < 0.4 and pool.num_free >= 3:
            held += pool.allocate(dice.randint(1, 3))
        elif action < 0.55 and held:
            held.append(held[dice.randrange(len(held))])
            pool.share([held[-1]])
        elif held:
            place = dice.randrange(len(held))
            block, held[place] = held[place], held[-1]
            held.pop()
            pool.hashed[block] = dice.random() < 0.5
            pool.release([block])
    assert sum(pool.refs) == len(held)
    for block in held:
        pool.release([block])
    assert pool.num_free == len(list(pool.free_blocks())) == 399 and not any(pool.refs)
