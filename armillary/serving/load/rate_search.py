"""The highest sustainable rate: the rate is doubled until it fails, then bisected.

A rate is sustained where every objective holds at its percentile, no request fails, and the number of requests in
flight does not grow over the test by more than its noise. A failed rate is tried once more, because one hiccup of the
machine is no limit of the server.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt

from armillary.serving.load.probe import ProbedServer
from armillary.serving.load.run import LoadTest, RunResult, run_once
from armillary.serving.load.sender import Watch
from armillary.serving.load.summary import LatencySummary, Summary
from armillary.spec.tables.traffic import Objective
from armillary.units import seconds_text

_MAX_ATTEMPTS = 24
_RESOLUTION = 1.08
_GROWTH_FRACTION = 0.05
_LATE_S = 0.25
_ATTEMPTS_PER_RATE = 2
_MIN_REQUESTS = 8
"""with fewer requests per run, the search ends without a rate"""


@dataclass(frozen=True, kw_only=True)
class RateAttempt:
    """One rate that was tried; it is sustained where there are no violations."""

    requests_per_s: float
    summary: Summary
    violations: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The highest sustained rate and the lowest failed one, where there is one; `run` is the run at the best rate, or
    the last one."""

    best: float | None
    failed: float | None
    attempts: tuple[RateAttempt, ...]
    run: RunResult


RunAtRate = Callable[[float, int], RunResult]
"""runs the test at a rate; the number of the run sets its seed"""


def rate_runner(
    probed: ProbedServer, test: LoadTest, show: Callable[[float], Watch | None] = lambda rate: None
) -> RunAtRate:
    """Runs `test` on a server at any rate; `show` gives the progress callback of a rate."""
    return lambda rate, number: run_once(probed, test.at_rate(rate), repeat=number, watch=show(rate))


def search_rate(
    try_rate: RunAtRate, objective: Objective, *, start: float, resolution: float = _RESOLUTION
) -> SearchResult:
    """Search from the rate `start` until the lowest failed rate is at most `resolution` times the highest sustained."""
    rate, best, failed = start, None, None
    attempts: list[RateAttempt] = []
    runs: dict[float, RunResult] = {}
    while len(attempts) < _MAX_ATTEMPTS:
        run = try_rate(rate, len(attempts))
        failures = tuple(violations(run.summary, objective))
        attempts.append(RateAttempt(requests_per_s=rate, summary=run.summary, violations=failures))
        runs[rate] = run
        if failures and sum(attempt.requests_per_s == rate for attempt in attempts) < _ATTEMPTS_PER_RATE:
            continue
        best, failed = (best, rate) if failures else (rate, failed)
        if best is None and run.summary.requests < _MIN_REQUESTS:
            break  # a lower rate would have even fewer requests
        if best is not None and failed is not None and failed <= best * resolution:
            break
        rate = _next(best, failed)
    shown = attempts[-1].requests_per_s if best is None else best
    return SearchResult(best=best, failed=failed, attempts=tuple(attempts), run=runs[shown])


def _next(best: float | None, failed: float | None) -> float:
    if failed is None:
        assert best is not None
        return 2 * best
    return failed / 2 if best is None else sqrt(best * failed)


def violations(summary: Summary, objective: Objective) -> list[str]:
    """Why a run does not show that its rate is sustained."""
    limits: tuple[tuple[str, float | None, LatencySummary], ...] = (
        ("TTFT", objective.ttft_p99_s, summary.due_ttft),
        ("ITL", objective.itl_p99_s, summary.itl),
        ("TPOT", objective.tpot_p99_s, summary.tpot),
        ("end to end", objective.e2e_p99_s, summary.due_e2e),
    )
    why = [
        f"{name} p99 {seconds_text(got.p99_s)} above {seconds_text(limit)}"
        for name, limit, got in limits
        if limit is not None and got.p99_s > limit
    ]
    if summary.failed:
        why.append(f"{summary.failed} of {summary.requests} requests failed")
    silent = summary.requests - summary.failed - summary.ttft.count
    if silent and objective.ttft_p99_s is not None:
        why.append(f"{silent} of {summary.requests} responses had no text")
    if summary.lag.send_p99_s > _LATE_S:
        delay = seconds_text(summary.lag.send_p99_s)
        why.append(f"requests were sent {delay} late: the generator's limit, not the server's")
    if summary.backlog_growth > max(_GROWTH_FRACTION * summary.requests, 3 * sqrt(max(1.0, summary.in_flight))):
        why.append(f"requests in flight grew by {summary.backlog_growth:.0f}")
    return why
