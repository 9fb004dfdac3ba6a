"""Servers set badly in one way each: the rule for it fires and the others leave it the cause."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from armillary.diagnosis.evidence.finding import Finding
from armillary.diagnosis.evidence.serving_run import ServingRun
from armillary.diagnosis.readings.reading import Reading
from armillary.diagnosis.rules.serving import RULES
from armillary.planning.simulation.step_cost import StepCost
from tests.diagnosis.served import COST, requests, served


def found(reading: Reading) -> list[Finding]:
    """What fires, the largest share first."""
    fired = [finding for rule in RULES if (finding := rule(reading, reading.plan)) is not None]
    assert all(0 < finding.share <= 1 and finding.evidence and finding.says for finding in fired)
    return sorted(fired, key=lambda finding: -finding.share)


def cause(reading: Reading) -> str | None:
    return next((finding.cause for finding in found(reading)), None)


@pytest.mark.parametrize("batching", ["static", "none", "dynamic"])
@pytest.mark.parametrize("rate", [None, 30.0])
def test_batches_that_are_begun_together(batching: Any, rate: float | None) -> None:
    assert cause(served(requests(60, rate=rate), batching=batching, max_running=8)) == "static_batching"


def test_a_window_that_is_waited_for_is_no_better() -> None:
    waited = served(requests(30, rate=2.0, tokens_out=8), batching="dynamic", batch_window_s=0.5)
    assert cause(waited) == "static_batching"


def test_prompts_that_go_in_slowly_though_nobody_waits() -> None:
    slow = requests(30, rate=2.0, tokens_in=600, tokens_out=64)
    given: dict[str, Any] = {"prefill_tokens": 16, "objective": {"ttft_p99_s": 0.25}}
    assert cause(served(slow, **given)) == "queueing"
    assert cause(served(slow, **{**given, "prefill_tokens": 128})) is None


def test_records_of_some_steps_of_a_long_run_say_the_same() -> None:
    """As a server writes them: older ones cut off, every third step."""
    whole = served(requests(120, rate=6.0, shared=512, tokens_in=16, tokens_out=8), prefix_cache=False)
    some = replace(whole, steps=whole.steps[len(whole.steps) // 2 :: 3], requests=whole.requests[60:])
    assert cause(whole) == cause(some) == "cache_misses"
    assert found(some)[0].share == pytest.approx(found(whole)[0].share, rel=0.25)


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_few_rows_while_many_wait(rows: int) -> None:
    first, *_ = found(served(requests(40), max_running=rows))
    assert first.cause == "batch_too_small" and f"all {rows} rows" in first.says


def test_few_rows_are_enough_where_a_row_costs_as_much_as_a_step() -> None:
    slow = StepCost(base_s=1e-4, prefill_s=1e-4, decode_s=5e-3)
    assert cause(served(requests(40), max_running=4, cost=slow, noise=0.02)) is None


@pytest.mark.parametrize("tokens", [512, 768, 1024])
def test_a_small_cache(tokens: int) -> None:
    long = requests(40, tokens_in=64, tokens_out=128)
    first, *_ = found(served(long, kv_tokens=tokens, max_model_len=512))
    assert first.cause in ("kv_pressure", "preemption") and f"{tokens:,} tokens" in first.says


@pytest.mark.parametrize("shared", [128, 512])
@pytest.mark.parametrize("rate", [None, 5.0])
def test_equal_beginnings_computed_each_time(shared: int, rate: float | None) -> None:
    assert (
        cause(
            served(
                requests(60, rate=rate, shared=shared, tokens_in=16, tokens_out=8),
                prefix_cache=False,
                prefill_tokens=256,
            )
        )
        == "cache_misses"
    )


def test_equal_beginnings_that_are_found_or_not_there_are_no_cause() -> None:
    kept = served(requests(60, shared=256, tokens_in=16, tokens_out=8), max_running=64)
    differ = served(requests(60, tokens_in=272, tokens_out=8), prefix_cache=False, max_running=64)
    assert "cache_misses" not in {finding.cause for reading in (kept, differ) for finding in found(reading)}


@pytest.mark.parametrize("prefixes", [8, 24])
def test_more_beginnings_than_the_cache_holds(prefixes: int) -> None:
    many = requests(5 * prefixes, shared=256, prefixes=prefixes, tokens_in=16, tokens_out=8)
    first, *_ = found(served(many, kv_tokens=1504, max_running=4, max_model_len=512))
    assert first.cause == "cache_misses" and first.rule == "prefix_cache_too_small"


@pytest.mark.parametrize("length", [600, 1200, 1800])
def test_long_prompts_among_answers(length: int) -> None:
    chats = requests(8, tokens_in=32, tokens_out=200)
    long = [replace(one, number=100 + one.number) for one in requests(10, rate=2.0, tokens_in=length, tokens_out=4)]
    both = sorted([*chats, *long], key=lambda one: one.at_s)
    whole = served(both, max_tokens_per_step=8192)
    assert cause(whole) == "prefill_interference"
    assert cause(served(both, max_tokens_per_step=8192, prefill_tokens=64)) is None


def test_an_objective_says_what_a_long_gap_is() -> None:
    both = requests(40, rate=4.0, tokens_in=128, tokens_out=32)
    assert cause(served(both)) is None
    assert cause(served(both, objective={"itl_p99_s": 0.015})) == "prefill_interference"


def test_prompts_by_few_tokens_a_step() -> None:
    assert cause(served(requests(24, tokens_in=500, tokens_out=8), max_tokens_per_step=32)) == "queueing"


@pytest.mark.parametrize("times", [1.5, 3.0])
def test_more_than_one_server_bears(times: float) -> None:
    flat = StepCost(base_s=0.004, prefill_s=2e-4, decode_s=1.2e-3)
    bears = served(requests(100), cost=flat).values["requests_per_s"]
    assert cause(served(requests(200, rate=bears * times), cost=flat)) == "too_few_replicas"


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_a_server_that_keeps_up_is_left_alone(load: float) -> None:
    bears = served(requests(100)).values["requests_per_s"]
    assert cause(served(requests(150, rate=bears * load))) is None


def test_a_batch_job_that_is_set_well_is_left_alone() -> None:
    flat = StepCost(base_s=0.002, prefill_s=2e-4, decode_s=1e-3)
    assert cause(served(requests(100), cost=flat)) is None


def test_launches_take_the_time_of_a_gpu() -> None:
    launch_bound = StepCost(base_s=0.008, prefill_s=1e-6, decode_s=1e-6)
    eager = served(requests(40, rate=20.0), chip="h200", graphs=False, cost=launch_bound)
    assert (found(eager)[0].loop, found(eager)[0].cause) == ("inner", "launch_overhead")
    waiting = StepCost(base_s=0.008, prefill_s=1e-6, decode_s=1e-6, waits=True)
    assert cause(served(requests(40, rate=20.0), chip="h200", graphs=False, cost=waiting)) is None


def test_what_kept_requests_out_is_told_apart() -> None:
    bottlenecks = {
        "rows": served(requests(40), max_running=2),
        "blocks": served(requests(40), kv_tokens=512),
        "budget": served(requests(40, tokens_in=500), max_tokens_per_step=32),
        "batch": served(requests(40), max_running=8, batching="static"),
    }
    for bottleneck, reading in bottlenecks.items():
        assert ServingRun(reading, reading.plan).bottleneck == bottleneck
    calm = served(requests(20, rate=1.0))
    assert ServingRun(calm, calm.plan).bottleneck is None and ServingRun(calm, calm.plan).cost is not None


def test_the_line_through_the_steps_is_the_one_they_were_made_of() -> None:
    reading = served(requests(60, rate=10.0, tokens_in=300), noise=0.0)
    cost = ServingRun(reading, reading.plan).cost
    assert cost is not None and cost.base_s == pytest.approx(COST.base_s, rel=0.1)
    assert cost.prefill_s == pytest.approx(COST.prefill_s, rel=0.1)
