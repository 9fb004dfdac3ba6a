"""Figures of one run: percentiles, throughput, goodput, errors, from the answers and nothing else.

The window is what was measured: from the end of the warm-up to the end of the test. Requests due in it count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from armillary.serving.load.client_lag import Lag
from armillary.serving.load.record import Answer
from armillary.spec.tables.serve import Objective
from armillary.stats import percentile, slope

_SAMPLES = 60


@dataclass(frozen=True, kw_only=True)
class Spread:
    """How a latency is distributed."""

    count: int
    """values"""
    mean_s: float
    p50_s: float
    p90_s: float
    p95_s: float
    p99_s: float
    max_s: float


def spread(values: Iterable[float | None]) -> Spread:
    found = sorted(value for value in values if value is not None)
    mean = sum(found) / len(found) if found else 0.0
    at = {percent: percentile(found, percent) for percent in (50, 90, 95, 99)}
    return Spread(
        count=len(found),
        mean_s=mean,
        p50_s=at[50],
        p90_s=at[90],
        p95_s=at[95],
        p99_s=at[99],
        max_s=found[-1] if found else 0.0,
    )


@dataclass(frozen=True, kw_only=True)
class Summary:
    """One run."""

    window_s: float
    """length of what was measured"""
    requests: int
    """due in the window"""
    failed: int
    """of which failed"""
    errors: Mapping[str, int]
    """why, and how often"""
    ttft: Spread
    """sent to first streamed text"""
    itl: Spread
    """gaps between consecutive streamed pieces, of all requests together"""
    tpot: Spread
    """(end-to-end − TTFT) / (tokens − 1), one a request"""
    e2e: Spread
    """sent to last streamed text"""
    due_ttft: Spread
    """TTFT from when the request was due"""
    due_e2e: Spread
    """end-to-end from when the request was due"""
    offered_per_s: float
    """requests due a second"""
    requests_per_s: float
    """answers completed in the window, a second"""
    tokens_in_per_s: float
    """prompt tokens of answers begun in the window, a second"""
    tokens_out_per_s: float
    """tokens that arrived in the window, a second"""
    goodput_requests_per_s: float
    """requests a second that met every objective"""
    slo_met_fraction: float
    """their share of all"""
    tokens_in: float
    """mean prompt length, by the server's count; 0: it does not say"""
    tokens_out: float
    """mean answer length"""
    tokens_a_piece: float
    """tokens of a streamed piece"""
    counted_by: str
    """usage, chunks, or both"""
    in_flight: float
    """mean number of requests under way"""
    backlog_growth: float
    """by how many requests that number grew over the window, by the straight line nearest to it"""
    lag: Lag
    """the generator's own"""


def summary(answers: Sequence[Answer], objective: Objective, lag: Lag, *, begin_s: float, end_s: float) -> Summary:
    """Figures of the window from `begin_s` to `end_s`."""
    measured = [answer for answer in answers if begin_s <= answer.due_s < end_s]
    good = [answer for answer in measured if answer.ok]
    met = [answer for answer in good if meets(answer, objective)]
    window, pieces = max(1e-9, end_s - begin_s), sum(len(answer.stamps_s) for answer in good)
    flight = in_flight(answers, begin_s=begin_s, end_s=end_s)
    return Summary(
        window_s=window,
        requests=len(measured),
        failed=len(measured) - len(good),
        errors=dict(Counter(answer.error for answer in measured if answer.error).most_common()),
        ttft=spread(answer.ttft_s for answer in good),
        tpot=spread(answer.tpot_s for answer in good),
        itl=spread(chain.from_iterable(answer.gaps_s for answer in good)),
        e2e=spread(answer.e2e_s for answer in good),
        due_ttft=spread(answer.due_ttft_s for answer in good),
        due_e2e=spread(answer.due_e2e_s for answer in good),
        offered_per_s=len(measured) / window,
        requests_per_s=sum(answer.ok and begin_s <= answer.end_s < end_s for answer in answers) / window,
        tokens_in_per_s=sum(_begun(answer, begin_s, end_s) for answer in answers) / window,
        tokens_out_per_s=sum(_arrived(answer, begin_s, end_s) for answer in answers) / window,
        goodput_requests_per_s=len(met) / window,
        slo_met_fraction=len(met) / len(measured) if measured else 0.0,
        tokens_in=_mean(answer.tokens_in for answer in good),
        tokens_out=_mean(answer.tokens_out for answer in good),
        tokens_a_piece=sum(answer.tokens_out for answer in good) / pieces if pieces else 0.0,
        counted_by=" and ".join(sorted({answer.counted_by for answer in good})) or "nobody",
        in_flight=sum(flight) / len(flight),
        lag=lag,
        backlog_growth=slope([i / len(flight) for i in range(len(flight))], flight),
    )


def meets(answer: Answer, objective: Objective) -> bool:
    """Whether one request met every objective that is set; its ITL is the 99th percentile of its own gaps. An answer
    of a single piece has no gaps, and no time a token, to be too long; one without any text meets no objective for its
    first."""
    asked = (
        (objective.ttft_p99_s, float("inf") if answer.ttft_s is None else answer.ttft_s),
        (objective.tpot_p99_s, answer.tpot_s),
        (objective.e2e_p99_s, answer.e2e_s),
        (objective.itl_p99_s, percentile(answer.gaps_s, 99) if objective.itl_p99_s else None),
    )
    return answer.ok and all(value <= limit for limit, value in asked if limit is not None and value is not None)


def in_flight(answers: Sequence[Answer], *, begin_s: float, end_s: float, samples: int = _SAMPLES) -> list[float]:
    """Requests under way at evenly spaced moments, counted from when they were due."""
    changes = sorted([(answer.due_s, 1) for answer in answers] + [(answer.end_s, -1) for answer in answers])
    found, at, now = [], 0, 0
    for i in range(samples):
        moment = begin_s + (i + 0.5) * (end_s - begin_s) / samples
        while at < len(changes) and changes[at][0] <= moment:
            now += changes[at][1]
            at += 1
        found.append(float(now))
    return found


def _begun(answer: Answer, begin_s: float, end_s: float) -> int:
    return (answer.tokens_in or 0) if answer.stamps_s and begin_s <= answer.stamps_s[0] < end_s else 0


def _arrived(answer: Answer, begin_s: float, end_s: float) -> float:
    """Tokens that came in the window; each piece stands for an equal share of the answer's."""
    if not answer.stamps_s:
        return 0.0
    inside = sum(begin_s <= stamp < end_s for stamp in answer.stamps_s)
    return inside * answer.tokens_out / len(answer.stamps_s)


def _mean(values: Iterable[int | None]) -> float:
    found = [value for value in values if value is not None]
    return sum(found) / len(found) if found else 0.0
