"""The highest rate that a server sustains: doubled until it fails, then halved in between.

A rate is sustained where every objective holds at its percentile, no request fails, and the number of requests under
way does not grow over the test by more than its noise. A rate that fails is tried once more: one hiccup of the machine
is no limit of the server.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt

from armillary.serving.load.probe import Probed
from armillary.serving.load.run import Ran, Test, run_once
from armillary.serving.load.sender import Watch
from armillary.serving.load.summary import Spread, Summary
from armillary.spec.tables.serve import Objective
from armillary.units import seconds_text

_MOST_TRIALS = 24
_NEAR = 1.08
_GROWTH_SHARE = 0.05
_LATE_S = 0.25
_CHANCES = 2
_FEW = 8
"""requests of a trial; with fewer, it ends without a rate"""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One rate that was tried."""

    requests_per_s: float
    """offered"""
    summary: Summary
    """its figures"""
    broken: tuple[str, ...]
    """why it is not sustained; empty: it is"""


@dataclass(frozen=True, kw_only=True)
class Found:
    """The end of a search."""

    best: float | None
    """highest rate sustained; none: not even the lowest that was tried"""
    failed: float | None
    """lowest rate that was not; none: none failed"""
    trials: tuple[Trial, ...]
    """in the order they were run"""
    ran: Ran
    """the run at the best rate, or the last one"""


Try = Callable[[float, int], Ran]
"""runs the test at a rate; the number is that of the trial, for its seed"""


def trying(probed: Probed, test: Test, show: Callable[[float], Watch | None] = lambda rate: None) -> Try:
    """Trials of `test` on a server; `show` gives what is told of a rate's progress."""
    return lambda rate, number: run_once(probed, test.at_rate(rate), repeat=number, watch=show(rate))


def search_rate(try_rate: Try, objective: Objective, *, start: float, near: float = _NEAR) -> Found:
    """Search from the rate `start` on, until the lowest failed rate is at most `near` times the highest sustained."""
    rate, best, failed = start, None, None
    trials: list[Trial] = []
    runs: dict[float, Ran] = {}
    while len(trials) < _MOST_TRIALS:
        ran = try_rate(rate, len(trials))
        broken = tuple(breaches(ran.summary, objective))
        trials.append(Trial(requests_per_s=rate, summary=ran.summary, broken=broken))
        runs[rate] = ran
        if broken and sum(trial.requests_per_s == rate for trial in trials) < _CHANCES:
            continue
        best, failed = (best, rate) if broken else (rate, failed)
        if best is None and ran.summary.requests < _FEW:
            break  # lower rates would prove nothing
        if best is not None and failed is not None and failed <= best * near:
            break
        rate = _next(best, failed)
    shown = trials[-1].requests_per_s if best is None else best
    return Found(best=best, failed=failed, trials=tuple(trials), ran=runs[shown])


def _next(best: float | None, failed: float | None) -> float:
    if failed is None:
        assert best is not None
        return 2 * best
    return failed / 2 if best is None else sqrt(best * failed)


def breaches(found: Summary, objective: Objective) -> list[str]:
    """Why a run is no proof that its rate is sustained."""
    named: tuple[tuple[str, float | None, Spread], ...] = (
        ("TTFT", objective.ttft_p99_s, found.due_ttft),
        ("ITL", objective.itl_p99_s, found.itl),
        ("TPOT", objective.tpot_p99_s, found.tpot),
        ("end to end", objective.e2e_p99_s, found.due_e2e),
    )
    why = [
        f"{name} p99 {seconds_text(got.p99_s)} above {seconds_text(limit)}"
        for name, limit, got in named
        if limit is not None and got.p99_s > limit
    ]
    if found.failed:
        why.append(f"{found.failed} of {found.requests} requests failed")
    silent = found.requests - found.failed - found.ttft.count
    if silent and objective.ttft_p99_s is not None:
        why.append(f"{silent} of {found.requests} answers had no text")
    if found.lag.send_p99_s > _LATE_S:
        late = seconds_text(found.lag.send_p99_s)
        why.append(f"requests were sent {late} late: the generator's limit, not the server's")
    if found.backlog_growth > max(_GROWTH_SHARE * found.requests, 3 * sqrt(max(1.0, found.in_flight))):
        why.append(f"requests under way grew by {found.backlog_growth:.0f}")
    return why
