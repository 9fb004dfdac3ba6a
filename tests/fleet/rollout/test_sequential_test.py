"""The error rates of the sequential tests, drawn by simulation: looked at after every few requests, for thousands of
rollouts with a canary that is as good as the others, or worse by the tolerance."""

from __future__ import annotations

from collections.abc import Iterable
from math import log

import numpy as np
import pytest

from armillary.fleet.rollout.sequential_test import (
    FALSE_ALARM,
    LEAST,
    MISS,
    Result,
    decide,
    failures_ratio,
    judge_failures,
    latency_ratio,
)
from armillary.stats import LogMoments

ROLLOUTS, LOOKS, EVERY = 200, 150, 40
"""drawn rollouts; looks at each, and requests of the canary between two of them"""
CHANCE = 0.03
"""two standard deviations of a share of 5 % among so many rollouts"""


def first_decision(results: Iterable[Result]) -> Result:
    """Of those at successive looks."""
    return next((each for each in results if each != "undecided"), "undecided")


def share_of(results: list[Result], wanted: Result) -> float:
    return results.count(wanted) / len(results)


def failures(usual: float, ours: float, others: int, seed: int) -> list[Result]:
    """Decisions on rollouts with `others` requests of other replicas per request of the canary."""
    draw, results = np.random.default_rng(seed), list[Result]()
    sizes = EVERY * np.arange(1, LOOKS + 1)
    for _ in range(ROLLOUTS):
        failed = np.cumsum(draw.binomial(EVERY, ours, LOOKS)).tolist()
        known = np.cumsum(draw.binomial(EVERY * others, usual, LOOKS)).tolist()
        looks = zip(failed, known, sizes.tolist(), strict=True)
        results.append(first_decision(judge_failures((k, n), (m, n * others), 0.01) for k, m, n in looks))
    return results


@pytest.mark.parametrize("usual", [0.0, 0.002, 0.02, 0.2])
@pytest.mark.parametrize("others", [9, 1])
def test_failures_are_judged_with_the_stated_error_rates(usual: float, others: int) -> None:
    """Nine others per request of the canary are the default share; one is blue/green."""
    assert share_of(failures(usual, usual, others, 0), "worse") <= FALSE_ALARM / (1 - MISS) + CHANCE
    worse = usual + max(0.01, 0.5 * usual)
    assert share_of(failures(usual, worse, others, 1), "as good") <= MISS / (1 - FALSE_ALARM) + CHANCE


def test_a_decision_comes_after_hundreds_of_requests() -> None:
    """Some 330 without a failure at a tolerance of 1 %: fewer say nothing of it. A few early failures end it."""
    many = (0, 10**6)
    assert decide(failures_ratio((0, 320), many, 0.01)) == "undecided"
    assert decide(failures_ratio((0, 335), many, 0.01)) == "as good"
    assert decide(failures_ratio((1, 10), many, 0.01)) == "undecided"
    assert decide(failures_ratio((2, 5), many, 0.01)) == "worse"
    assert failures_ratio((3, 9), (0, 0), 0.01) == 0.0  # with nothing to compare


def test_little_history_keeps_nobody_waiting() -> None:
    """Blue/green: the old set has served a hundred requests before the switch, and gets none after it."""
    assert decide(failures_ratio((0, 10_000), (0, 100), 0.01)) == "undecided"
    assert (
        judge_failures((0, 400), (0, 100), 0.01) == "as good"
        and judge_failures((0, 300), (0, 100), 0.01) == "undecided"
    )
    assert judge_failures((9, 100), (0, 100), 0.01) == "worse"


def moments(values: np.ndarray) -> LogMoments:
    return LogMoments(len(values), float(values.sum()), float((values**2).sum()))


def latencies(slower: float, others: int, seed: int) -> list[Result]:
    """Decisions on rollouts, a fifth of whose requests take three times as long (long prompts)."""
    draw, results = np.random.default_rng(seed), list[Result]()

    def drawn(count: int, factor: float) -> np.ndarray:
        return draw.normal(log(0.05 * factor), 0.4, count) + log(3) * (draw.random(count) < 0.2)

    for _ in range(ROLLOUTS):
        ours, theirs = drawn(1500, slower), drawn(1500 * others, 1.0)
        sizes = range(LEAST, 1500, EVERY)
        looks = (latency_ratio(moments(ours[:n]), moments(theirs[: n * others]), 1.2) for n in sizes)
        results.append(first_decision(map(decide, looks)))
    return results


@pytest.mark.parametrize("others", [1, 9])
def test_latencies_are_judged_with_the_stated_error_rates(others: int) -> None:
    assert share_of(latencies(1.0, others, 0), "worse") <= FALSE_ALARM / (1 - MISS) + CHANCE
    assert share_of(latencies(1.2, others, 1), "as good") <= MISS / (1 - FALSE_ALARM) + CHANCE


def test_few_latencies_say_nothing() -> None:
    few, many = moments(np.full(LEAST - 1, 1.0)), moments(np.full(500, 0.1))
    assert latency_ratio(few, many, 1.2) == 0.0


def test_moments_since_a_copy() -> None:
    before, now = LogMoments(), LogMoments()
    for seconds in (0.1, 0.2):
        before.add(seconds)
        now.add(seconds)
    for seconds in (0.5, 0.7, 0.9):
        now.add(seconds)
    since = now.plus(before, -1)
    expected = np.log([0.5, 0.7, 0.9])
    assert since.count == 3 and abs(since.mean - expected.mean()) < 1e-12
    assert abs(since.variance - expected.var(ddof=1)) < 1e-12
