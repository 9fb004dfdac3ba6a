"""Answers do not depend on how they were scheduled: batching, chunks, preemption, prefix hits, block size, overlap."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.engine.cache.layer_groups import FULL_ATTENTION, Group
from armillary.engine.scheduler.invariants import check_idle
from armillary.engine.scheduler.step_loop import Loop
from tests.engine.fake import FakeExecutor, ask, expected, make_scheduler, run

WINDOW = (Group(sees="window", reach=6),)
MIXED = (Group(), Group(sees="window", reach=5), Group(sees="window", reach=9))
CHUNKED = (Group(), Group(sees="chunk", reach=8))

prompts = st.lists(st.integers(2, 4), min_size=1, max_size=26)  # few ids: prompts often begin alike
requests = st.lists(st.tuples(prompts, st.integers(1, 14), st.integers(1, 3)), min_size=1, max_size=7)


@settings(max_examples=120, deadline=None)
@given(
    wanted=requests,
    batching=st.sampled_from(["none", "static", "dynamic", "continuous"]),
    groups=st.sampled_from([FULL_ATTENTION, FULL_ATTENTION, WINDOW, MIXED, CHUNKED]),
    block_tokens=st.sampled_from([1, 2, 4, 7]),
    spare=st.integers(0, 12),
    step_tokens=st.integers(4, 24),
    prefix=st.booleans(),
    overlap=st.booleans(),
    every=st.integers(0, 3),
    prefill_tokens=st.none() | st.integers(1, 6),
    reserve=st.none() | st.just(0.0),
    lookups=st.integers(1, 8),
    host_blocks=st.sampled_from([0, 2, 40]),
    ageing=st.sampled_from([0.0, 3.0]),
    num_stages=st.sampled_from([1, 1, 2, 3]),
)
def test_answers_are_those_of_the_request_alone(
    wanted: list[tuple[list[int], int, int]],
    block_tokens: int,
    spare: int,
    step_tokens: int,
    overlap: bool,
    every: int,
    groups: Any,
    ageing: float,
    **given_settings: Any,
) -> None:
    made = [ask(f"r{i}", prompt, most, n=n, priority=i % 3) for i, (prompt, most, n) in enumerate(wanted)]
    per_group = max(-(-(len(request.prompt) + request.params.max_tokens) // block_tokens) for request in made)
    scheduler = make_scheduler(
        num_blocks=per_group * len(groups) + spare,
        block_tokens=block_tokens,
        groups=groups,
        max_tokens_per_step=step_tokens,
        ageing_s=ageing,
        **given_settings,
    )
    answers = run(scheduler, made, overlap=overlap, every=every)
    for request in made:
        for index in range(request.params.n):
            name = request.id if request.params.n == 1 else f"{request.id}/{index}"
            assert answers[name] == expected(request, index, groups), name


@pytest.mark.parametrize(("overlap", "num_stages"), [(False, 1), (True, 1), (False, 2), (False, 3)])
def test_preempted_and_forked_and_cached_at_once(overlap: bool, num_stages: int) -> None:
    made = [ask(f"r{i}", [2, 3, 4, 5] * 3 + [i + 2], 24, n=2) for i in range(6)]
    scheduler = make_scheduler(num_blocks=14, reserve=0.0, num_stages=num_stages)
    answers = run(scheduler, made, overlap=overlap)
    assert scheduler.totals.preempted and scheduler.totals.hits
    assert all(answers[f"{r.id}/{i}"] == expected(r, i) for r in made for i in range(2))


def test_a_hash_that_always_collides_costs_hits_and_nothing_else() -> None:
    made = [ask(f"r{i}", [2 + i % 3] * (5 + i), 6) for i in range(8)]
    answers = run(make_scheduler(num_blocks=24, digest=lambda parent, chunk: b"same"), made, every=2)
    assert all(answers[request.id] == expected(request) for request in made)


@settings(max_examples=60, deadline=None)
@given(
    wanted=requests,
    aborts=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 30)), max_size=4),
    fails=st.lists(st.integers(0, 30), max_size=2),
    groups=st.sampled_from([FULL_ATTENTION, MIXED]),
    spare=st.integers(0, 12),
    prefix=st.booleans(),
    overlap=st.booleans(),
    host_blocks=st.sampled_from([0, 3, 40]),
    num_stages=st.sampled_from([1, 1, 2, 3]),
)
def test_aborts_and_failed_steps_leave_the_other_answers_right(
    wanted: list[tuple[list[int], int, int]],
    aborts: list[tuple[int, int]],
    fails: list[int],
    groups: Any,
    spare: int,
    prefix: bool,
    overlap: bool,
    host_blocks: int,
    num_stages: int,
) -> None:
    made = [ask(f"r{i}", prompt, most, n=n) for i, (prompt, most, n) in enumerate(wanted)]
    scheduler = make_scheduler(
        num_blocks=10 * len(groups) + spare,
        groups=groups,
        prefix=prefix,
        host_blocks=host_blocks,
        num_stages=num_stages,
    )
    loop = Loop(scheduler, FakeExecutor(scheduler.cache, 4, staged=num_stages > 1), overlap=overlap)
    answers = [seq for request in made for seq in scheduler.submit(request, 0.0)]
    for number in range(2000):
        for which, when in aborts:
            if when == number:
                scheduler.abort(f"r{which}", 0.0)
        loop.step()
        if number in fails:
            loop.fail("the device is gone; start again")
        if not scheduler.has_work and not scheduler.under_way:
            break
    check_idle(scheduler)
    for seq in answers:
        right = expected(seq.request, seq.index, groups)
        assert seq.output == right[: seq.num_output], seq.id
        assert seq.output == right or seq.finish in ("abort", "error")
