"""Figures from answers made by hand: every definition once, in numbers that can be checked on paper."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from armillary.serving.load.client_lag import Lag
from armillary.serving.load.rate_search import violations
from armillary.serving.load.record import RequestResult
from armillary.serving.load.summary import in_flight, summary
from armillary.spec.tables.traffic import Objective
from armillary.stats import estimate, percentile, slope


def answer(due: float, *stamps: float, late: float = 0.0, tokens: int | None = None, error: str = "") -> RequestResult:
    sent = due + late
    end = max([sent, *(due + stamp for stamp in stamps)])
    times = tuple(due + stamp for stamp in stamps)
    return RequestResult(
        index=0,
        due_s=due,
        sent_s=sent,
        end_s=end,
        stamps_s=times,
        tokens_in=10,
        tokens_out=len(stamps) if tokens is None else tokens,
        counted_by="usage",
        error=error,
    )


def test_the_latencies_of_one_answer() -> None:
    one = answer(5.0, 0.5, 0.6, 0.9, late=0.1)
    assert one.ttft_s == pytest.approx(0.4) and one.due_ttft_s == pytest.approx(0.5)
    assert one.e2e_s == pytest.approx(0.8) and one.due_e2e_s == pytest.approx(0.9)
    assert one.gaps_s == pytest.approx([0.1, 0.3]) and one.tpot_s == pytest.approx(0.2)
    assert answer(0, 0.5).tpot_s is None


def test_warm_up_and_what_comes_after_do_not_count() -> None:
    answers = [answer(0.5, 0.1, 0.7), answer(1.5, 0.1, 0.2), answer(2.5, 0.1, 1.0), answer(3.5, 0.1)]
    found = summary(answers, Objective(), Lag(), begin_s=1.0, end_s=3.0)
    assert found.requests == 2 and found.offered_per_s == 1.0
    assert found.requests_per_s == 1.0  # the first and second ended inside, the third after
    assert found.tokens_out_per_s == 2.0  # 1.2; 1.6, 1.7; 2.6
    assert found.tokens_in_per_s == 10.0  # the second and third began inside


def test_goodput_counts_requests_that_meet_everything() -> None:
    answers = [answer(0, 0.1, 0.2), answer(0, 0.9, 1.0), answer(0, 0.1, 0.8), answer(0, error="HTTP 500: x")]
    asked = Objective(ttft_p99_s=0.5, itl_p99_s=0.3)
    found = summary(answers, asked, Lag(), begin_s=0.0, end_s=2.0)
    assert found.goodput_requests_per_s == 0.5 and found.slo_met_fraction == 0.25
    assert found.failed == 1 and found.errors == {"HTTP 500: x": 1}
    assert len(violations(found, asked)) == 3  # TTFT, ITL, a failure


def test_an_answer_without_text_meets_no_objective_for_its_first() -> None:
    answers = [answer(0, 0.1, 0.2), answer(0, tokens=0)]
    for asked, share in ((Objective(ttft_p99_s=0.5), 0.5), (Objective(e2e_p99_s=0.5), 1.0)):
        found = summary(answers, asked, Lag(), begin_s=0.0, end_s=2.0)
        assert found.failed == 0 and found.slo_met_fraction == share
        assert [why for why in violations(found, asked) if "no text" in why] == (
            ["1 of 2 responses had no text"] if share < 1 else []
        )


def test_pieces_of_several_tokens() -> None:
    found = summary([answer(0, 0.1, 0.2, tokens=8)], Objective(), Lag(), begin_s=0.0, end_s=1.0)
    assert found.tokens_per_chunk == 4 and found.tokens_out_per_s == 8 and found.tpot.p50_s == pytest.approx(0.1 / 7)


def test_a_growing_backlog_is_a_breach() -> None:
    overload = [answer(i / 10, 0.1 + i / 20) for i in range(200)]  # 10 a second come, 6.7 leave
    steady = [answer(i / 10, 0.5) for i in range(200)]
    assert in_flight(steady, begin_s=5, end_s=15, samples=4) == pytest.approx([5, 5, 5, 5], abs=1)
    found = summary(overload, Objective(), Lag(), begin_s=0.0, end_s=20.0)
    assert found.backlog_growth > 40 and "grew" in violations(found, Objective())[0]
    assert violations(summary(steady, Objective(), Lag(), begin_s=1.0, end_s=20.0), Objective()) == []


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=60), st.integers(1, 100))
def test_a_percentile_is_the_smallest_value_that_so_many_do_not_exceed(values: list[float], percent: int) -> None:
    found = percentile(values, percent)
    assert found in values
    assert 100 * sum(value <= found for value in values) >= percent * len(values)
    assert 100 * sum(value < found for value in values) < percent * len(values)


def test_intervals() -> None:
    assert estimate([3.0]).half_width is None
    found = estimate([1.0, 2.0, 3.0])
    assert found.mean == 2.0 and found.half_width == pytest.approx(4.302652730 / 3**0.5) and found.low < 0 < found.high
    assert estimate([5.0] * 40).half_width == 0.0
    assert slope([0, 1, 2], [1, 3, 5]) == pytest.approx(2.0)


def test_a_generator_that_falls_behind_is_found_out() -> None:
    assert Lag(cpu_fraction=0.97).limits(1.0) and Lag(send_p99_s=0.2).limits(1.0)
    assert not Lag(cpu_fraction=0.3, loop_p99_s=0.002, send_p99_s=0.003).limits(0.02)
