"""Records of steps and requests use the one vocabulary and add up."""

from __future__ import annotations

import pytest

from armillary.engine.cache.prefix_cache import MEANING
from armillary.engine.scheduler.step_loop import Loop
from armillary.engine.telemetry.gauges import request_gauges, state_gauges, step_gauges
from armillary.spec.gauges import GAUGES
from tests.engine.fake import FakeExecutor, ask, expected, make_scheduler, run


def test_gauges_of_steps_and_requests() -> None:
    scheduler = make_scheduler(num_blocks=20, max_tokens_per_step=8)
    (seq,) = scheduler.submit(ask("a", list(range(2, 14)), 4), 1.0)
    seen = []
    for now in (3.0, 4.0, 5.0, 6.0, 7.5):
        decision = scheduler.schedule(now - 0.5)
        seen.append(step_gauges(scheduler, decision))
        scheduler.update(decision, [9] * len(decision.sampling), now)
    assert [row["prefill_tokens"] for row in seen] == [8, 4, 0, 0, 0]
    assert [row["decode_tokens"] for row in seen] == [0, 0, 1, 1, 1]
    assert [row["running"] for row in seen] == [1, 1, 1, 1, 1]
    assert [row["drawn_tokens"] for row in seen] == [0, 1, 1, 1, 1], "at a temperature of 1"
    assert seen[0]["kv_used_fraction"] == pytest.approx(2 / 20) and seen[0]["kv_capacity_tokens"] == 80
    found = request_gauges(seq)
    assert found == {
        "tokens_in": 12,
        "tokens_out": 4,
        "cached_tokens": 0,
        "e2e_s": 6.5,
        "queue_s": 1.5,
        "arrived_s": 1.0,
        "request_number": 1,
        "tokens_limit": 4,
        "temperature": 1.0,
        "itl_max_s": 0.0,
        "ttft_s": 3.0,
        "prefill_s": 1.5,
        "decode_s": 3.5,
        "tpot_s": pytest.approx(3.5 / 3),
    }
    last = step_gauges(scheduler, scheduler.schedule(8.0))
    assert (last["requests_total"], last["tokens_out_total"], last["kv_used_fraction"]) == (1, 4, 0.0)
    assert set(last) | set(found) <= set(GAUGES)


def test_a_request_that_never_ran_has_no_times_of_running() -> None:
    scheduler = make_scheduler()
    (seq,) = scheduler.submit(ask("a", [2, 3]), 1.0)
    scheduler.abort("a", 4.0)
    assert request_gauges(seq) == {
        "tokens_in": 2,
        "tokens_out": 0,
        "cached_tokens": 0,
        "e2e_s": 3.0,
        "arrived_s": 1.0,
        "request_number": 1,
        "tokens_limit": 8,
        "temperature": 1.0,
    }


def test_the_gauges_say_why_prompts_were_not_found_and_what_preemption_cost() -> None:
    scheduler = make_scheduler(num_blocks=7, reserve=0.0)
    made = [ask(f"r{i}", [2, 3, 4, 5, 6, 7, 8, 9, 10 + i], 12, min_tokens=12) for i in range(3)]
    run(scheduler, made, overlap=True)
    totals, state = scheduler.totals, state_gauges(scheduler)
    assert (state["running"], state["waiting"], state["requests_total"]) == (0, 0, 3)
    # the second starts beside the first, computes a block, and finds the next one computed by then
    assert (state["prefix_hits_total"], state["prefix_queries_total"]) == (12, 27)
    assert totals.misses == {"partial": 1, "cold": 2} and set(totals.misses) <= set(MEANING)
    assert (state["preemptions_total"], state["recomputed_total"]) == (1, 15)


def test_a_step_that_fails_ends_what_was_under_way() -> None:
    scheduler = make_scheduler(num_blocks=20)
    loop = Loop(scheduler, FakeExecutor(scheduler.cache, 4))  # by the wall clock
    (seq,) = scheduler.submit(ask("a", [2, 3]), 0.0)
    loop.step()
    assert loop.fail("device lost; start again") == [seq] and seq.finish == "error"
    after = ask("b", [2, 3], 4)
    (seq,) = scheduler.submit(after, 2.0)
    while scheduler.has_work:
        loop.step()
    assert seq.output == expected(after)
