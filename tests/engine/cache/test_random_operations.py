"""A hundred thousand random operations, and any order of a few: nothing leaks, nothing is lost."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from armillary.engine.cache.layer_groups import FULL_ATTENTION, Group
from armillary.engine.scheduler.invariants import check, check_idle
from armillary.errors import BadInput
from tests.engine.fake import VOCAB, ask, make_scheduler

MIXED = (Group(), Group(sees="window", reach=6))


MANY = [pytest.param(groups, 100_000, 12, marks=pytest.mark.slow) for groups in (FULL_ATTENTION, MIXED)]


@pytest.mark.parametrize(
    ("groups", "operations", "host_blocks"),
    [(FULL_ATTENTION, 20_000, 0), (MIXED, 8_000, 0), (FULL_ATTENTION, 10_000, 12), (MIXED, 6_000, 24), *MANY],
)
def test_random_operations_leave_nothing_allocated(groups: Any, operations: int, host_blocks: int) -> None:
    dice = random.Random(7)
    scheduler = make_scheduler(
        num_blocks=16 * len(groups),
        groups=groups,
        host_blocks=host_blocks,
        check_every=0,
        max_running=8,
        max_waiting=12,
        max_tokens_per_step=24,
        ageing_s=5.0,
        lookups=6,
        reserve=0.0,
    )
    for number in range(operations):
        action, now = dice.random(), number / 10
        if action < 0.1:
            prompt = [dice.randint(2, 3) for _ in range(dice.randint(1, 30))]
            request = ask(
                f"r{number}",
                prompt,
                dice.randint(1, 20),
                n=dice.choice((1, 1, 1, 2, 3)),
                priority=dice.randint(0, 2),
                timeout_s=dice.choice((None, None, 8.0)),
            )
            try:
                scheduler.submit(request, now)
            except BadInput:
                assert len(scheduler.request_table.waiting) >= 12
        elif action < 0.11 and scheduler.has_work:
            scheduler.abort(dice.choice(list(scheduler.request_table.requests)), now)
        elif len(scheduler.under_way) < 2 and action < 0.6:
            scheduler.schedule(now)
        elif scheduler.under_way:
            decision = scheduler.under_way[0]
            least = -1 if action > 0.995 else 1
            tokens = [dice.randint(least, 20) for _ in decision.sampling]
            scheduler.update(decision, tokens, now)
        if not number % 500:
            check(scheduler)
    totals = scheduler.totals
    assert totals.preempted and totals.hits and totals.aborted and totals.discarded
    assert totals.rejected and totals.errors
    for name in list(scheduler.request_table.requests):
        scheduler.abort(name, 1e9)
    while scheduler.under_way:
        decision = scheduler.under_way[0]
        scheduler.update(decision, [5] * len(decision.sampling), 1e9)
    check_idle(scheduler)


class EngineMachine(RuleBasedStateMachine):
    """Submit, decide, take tokens, abort, let time pass: in any order, checked after each."""

    @initialize(
        blocks=st.integers(8, 20),
        size=st.sampled_from([1, 2, 4]),
        prefix=st.booleans(),
        reserve=st.sampled_from([None, 0.0, 1.0]),
        mode=st.sampled_from(["continuous", "static", "none"]),
        groups=st.sampled_from([FULL_ATTENTION, MIXED]),
        host_blocks=st.sampled_from([0, 4, 30]),
    )
    def begin(
        self, blocks: int, size: int, prefix: bool, reserve: float | None, mode: str, groups: Any, host_blocks: int
    ) -> None:
        self.scheduler = make_scheduler(
            num_blocks=blocks * len(groups),
            block_tokens=size,
            prefix=prefix,
            reserve=reserve,
            batching=mode,
            groups=groups,
            host_blocks=host_blocks,
            max_running=3,
            max_tokens_per_step=8,
            lookups=3,
            max_wait_s=30.0,
        )
        self.number, self.now = 0, 0.0

    @rule(prompt=st.lists(st.integers(2, 3), max_size=16), most=st.integers(1, 8), n=st.integers(1, 2))
    def submit(self, prompt: list[int], most: int, n: int) -> None:
        self.number += 1
        try:
            self.scheduler.submit(ask(f"r{self.number}", prompt, most, n=n), self.now)
        except BadInput as error:
            assert not prompt or "KV blocks" in str(error)

    @precondition(lambda self: len(self.scheduler.under_way) < 2)
    @rule(passed=st.floats(0, 3))
    def decide(self, passed: float) -> None:
        self.now += passed
        self.scheduler.schedule(self.now)

    @precondition(lambda self: self.scheduler.under_way)
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        decision = self.scheduler.under_way[0]
        count = len(decision.sampling)
        tokens = data.draw(st.lists(st.integers(-1, VOCAB - 1), min_size=count, max_size=count))
        self.scheduler.update(decision, tokens, self.now)

    @precondition(lambda self: self.scheduler.request_table.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.scheduler.abort(data.draw(st.sampled_from(sorted(self.scheduler.request_table.requests))), self.now)

    @precondition(lambda self: self.scheduler.under_way)
    @rule()
    def fail(self) -> None:
        self.scheduler.fail(self.now, "the executor failed; try again")

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "scheduler"):
            check(self.scheduler)

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        scheduler = self.scheduler
        for _ in range(500):
            while scheduler.under_way:
                decision = scheduler.under_way[0]
                scheduler.update(decision, [5] * len(decision.sampling), self.now)
            if not scheduler.has_work:
                break
            scheduler.schedule(self.now)
        check_idle(scheduler)


EngineMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
test_any_order_of_operations = EngineMachine.TestCase
