"""Evicted blocks go to host memory and come back, preempted requests among them, where that is cheaper."""

from __future__ import annotations

import random

import pytest

from armillary.engine.cache.kv_offload import KVOffload, OffloadCosts
from armillary.engine.cache.layer_groups import FULL_ATTENTION, Group
from armillary.engine.scheduler.invariants import check_idle
from armillary.engine.scheduler.scheduler import Scheduler
from armillary.engine.scheduler.step_loop import Loop
from tests.engine.fake import FakeExecutor, ask, expected, make_scheduler
from tests.engine.runner.test_out_of_memory import Tight

PROMPTS = {name: [2 + number, 3, 4, 5] * 4 for number, name in enumerate("abcdef")}  # four blocks each


def offload(scheduler: Scheduler) -> KVOffload:
    assert scheduler.cache.offload is not None
    return scheduler.cache.offload


def turns(scheduler: Scheduler, executor: FakeExecutor, names: str) -> list[int]:
    """One request after the other; prompt tokens found for each."""
    loop, found = Loop(scheduler, executor, overlap=False, clock=lambda: 0.0), []
    for number, name in enumerate(names):
        request = ask(f"{name}{number}", PROMPTS[name], 2)
        (seq,) = scheduler.submit(request, 0.0)
        while scheduler.has_work:
            loop.step()
        assert seq.output == expected(request), name
        found.append(seq.cached_tokens)
    check_idle(scheduler)
    return found


def test_prompts_that_the_device_has_evicted_are_found_on_the_host() -> None:
    names = "abcdef" * 2
    alone = make_scheduler(num_blocks=8)
    assert turns(alone, FakeExecutor(alone.cache, 4), names) == [0] * 12
    scheduler = make_scheduler(num_blocks=8, host_blocks=40)
    executor = FakeExecutor(scheduler.cache, 4)
    assert turns(scheduler, executor, names) == [0] * 6 + [12] * 6
    host = offload(scheduler)
    assert host.num_loaded == 18 and host.num_offloaded >= 16 and host.used_fraction > 0.5
    before = host.num_offloaded
    turns(scheduler, executor, "abcdef")
    assert host.num_offloaded - before <= 3  # what is on the host is not copied there again


def test_the_least_recently_used_leave_the_host_first() -> None:
    scheduler = make_scheduler(num_blocks=6, host_blocks=12)
    found = turns(scheduler, FakeExecutor(scheduler.cache, 4), "abcd" + "dcba")
    assert found[4:7] == [12, 12, 12] and found[7] < 12


@pytest.mark.parametrize("groups", [FULL_ATTENTION, (Group(), Group(sees="window", reach=5))])
def test_preempted_requests_are_swapped(groups: tuple[Group, ...]) -> None:
    made = [ask(f"r{i}", [2, 3, 4, 5] * 3 + [i + 2], 30) for i in range(5)]
    scheduler = make_scheduler(num_blocks=15 * len(groups), groups=groups, reserve=0.0, host_blocks=200)
    loop = Loop(scheduler, FakeExecutor(scheduler.cache, 4), overlap=False, clock=lambda: 0.0)
    sequences = [seq for request in made for seq in scheduler.submit(request, 0.0)]
    while scheduler.has_work:
        loop.step()
    check_idle(scheduler)
    assert [seq.output for seq in sequences] == [expected(seq.request, 0, groups) for seq in sequences]
    assert scheduler.totals.preempted and offload(scheduler).swapped_in > 0


def test_what_is_cheaper_to_compute_is_not_loaded() -> None:
    scheduler = make_scheduler(num_blocks=8, host_blocks=40)
    offload(scheduler).costs = OffloadCosts(block_s=9.0, token_s=2.0)
    executor = FakeExecutor(scheduler.cache, 4)
    assert turns(scheduler, executor, "abcdef" * 2) == [0] * 12
    assert offload(scheduler).declined == 72 and not offload(scheduler).num_loaded


def test_costs_of_a_block_grow_with_its_position() -> None:
    costs = OffloadCosts(block_s=50.0, token_s=2.0, pair_s=0.1)
    assert not costs.pays(1, 0, 16) and costs.pays(1, 16, 16)  # instead of 45.6 s and 71.2 s
    assert costs.pays(2, 0, 32)  # 116.8 s


def test_nothing_is_loaded_after_copies_were_lost() -> None:
    scheduler = make_scheduler(num_blocks=8, host_blocks=40)
    executor = FakeExecutor(scheduler.cache, 4)
    turns(scheduler, executor, "abcdef")
    scheduler.fail(0.0, "the device is gone; start again")
    assert not offload(scheduler).used_fraction
    assert turns(scheduler, executor, "a") == [0]


@pytest.mark.parametrize("seed", range(4))
def test_copies_of_steps_that_are_taken_back_are_made_later(seed: int) -> None:
    dice = random.Random(seed)
    scheduler = make_scheduler(num_blocks=12, host_blocks=dice.choice([3, 9, 50]), reserve=0.0)
    executor = Tight(scheduler.cache, 4)
    loop = Loop(scheduler, executor, overlap=bool(seed % 2), clock=lambda: 0.0)
    sequences = []
    for number in range(400):
        executor.room = dice.choice([3, 5, 1000])
        if not number % 6 and number < 240:
            request = ask(f"r{number}", PROMPTS[dice.choice("abcdef")] + [dice.randint(2, 9)], 9)
            sequences += scheduler.submit(request, 0.0)
        loop.step()
    while scheduler.has_work or scheduler.under_way:
        loop.step()
    check_idle(scheduler)
    assert scheduler.totals.shrunk and scheduler.totals.hits
    for seq in sequences:
        assert seq.finish == "error" or seq.output == expected(seq.request), seq.id
