"""The search for the highest rate, on a server made of arithmetic: beyond its limit a queue grows."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.serving.load.client_lag import Lag
from armillary.serving.load.rate_search import SearchResult, search_rate
from armillary.serving.load.record import RequestResult
from armillary.serving.load.report_text import attempt_rows, best_text
from armillary.serving.load.run import RunResult
from armillary.serving.load.summary import summary
from armillary.spec.tables.traffic import Objective

SECONDS, WORK_S = 20.0, 0.1


def queue(capacity: float, rate: float) -> RunResult:
    """First come, first served, one leaves every 1/capacity seconds; the answer takes 0.1 s."""
    answers, free = [], 0.0
    for i in range(round(rate * SECONDS)):
        due = i / rate
        free = max(free, due) + 1 / capacity
        at = free + WORK_S
        answers.append(RequestResult(index=i, due_s=due, sent_s=due, end_s=at, stamps_s=(at,), tokens_out=1))
    found = summary(answers, Objective(), Lag(), begin_s=0.0, end_s=SECONDS)
    return RunResult(summary=found, results=tuple(answers), begin_s=0.0, end_s=SECONDS)


def search(capacity: float, start: float, objective: Objective | None = None) -> SearchResult:
    return search_rate(lambda rate, number: queue(capacity, rate), objective or Objective(), start=start)


@settings(max_examples=15, deadline=None)
@given(capacity=st.floats(3, 60), start=st.floats(1, 80))
def test_the_limit_is_found_from_above_and_from_below(capacity: float, start: float) -> None:
    found = search(capacity, start)
    assert found.best is not None and found.failed is not None
    assert 0.85 * capacity < found.best < 1.2 * capacity and found.failed <= 1.081 * found.best


def test_an_objective_lowers_it() -> None:
    assert search(20, 4, Objective(ttft_p99_s=0.2)).best == pytest.approx(20, rel=0.1)
    strict = search(20, 4, Objective(ttft_p99_s=0.05))
    assert strict.best is None and "no rate was sustained" in best_text(strict)
    assert "TTFT p99" in attempt_rows(strict)[0][-1]


def test_a_server_without_a_limit_is_said_to_have_none_found() -> None:
    def quick(rate: float, number: int) -> RunResult:
        return queue(1e9, min(rate, 50))

    found = search_rate(quick, Objective(), start=1)
    assert found.failed is None and "the limit is above it" in best_text(found)


def test_a_generator_that_falls_behind_ends_the_search_in_words() -> None:
    def late(rate: float, number: int) -> RunResult:
        ran = queue(1e9, rate)
        return replace(ran, summary=replace(ran.summary, lag=Lag(send_p99_s=rate / 100)))

    found = search_rate(late, Objective(), start=10)
    assert found.best is not None and found.best <= 25 and "the generator's limit" in attempt_rows(found)[-1][-1]
