"""Summary of one run: percentiles, throughput, goodput and errors, from the results of its requests.

The window goes from the end of the warm-up to the end of the test; requests due in it count.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from armillary.serving.load.client_lag import Lag
from armillary.serving.load.record import RequestResult
from armillary.spec.tables.traffic import Objective
from armillary.stats import percentile, slope

_SAMPLES = 60


@dataclass(frozen=True, kw_only=True)
class LatencySummary:
    """The distribution of a latency."""

    count: int
    mean_s: float
    p50_s: float
    p90_s: float
    p95_s: float
    p99_s: float
    max_s: float


def latency_summary(values: Iterable[float | None]) -> LatencySummary:
    ordered = sorted(value for value in values if value is not None)
    return LatencySummary(
        count=len(ordered),
        mean_s=_mean(ordered),
        p50_s=percentile(ordered, 50),
        p90_s=percentile(ordered, 90),
        p95_s=percentile(ordered, 95),
        p99_s=percentile(ordered, 99),
        max_s=ordered[-1] if ordered else 0.0,
    )


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The figures of one run; `report_text.DEFINITIONS` has those of latencies, throughput and goodput."""

    window_s: float
    requests: int
    failed: int
    errors: Mapping[str, int]
    ttft: LatencySummary
    itl: LatencySummary
    tpot: LatencySummary
    e2e: LatencySummary
    due_ttft: LatencySummary
    due_e2e: LatencySummary
    offered_per_s: float
    requests_per_s: float
    tokens_in_per_s: float
    """prompt tokens of responses begun in the window, per second"""
    tokens_out_per_s: float
    goodput_requests_per_s: float
    slo_met_fraction: float
    tokens_in: float
    """mean prompt length by the server's count; 0: not reported"""
    tokens_out: float
    tokens_per_chunk: float
    counted_by: str
    """usage, chunks, or both"""
    in_flight: float
    backlog_growth: float
    """growth of that number over the window, by linear regression"""
    lag: Lag


def summary(
    results: Sequence[RequestResult], objective: Objective, lag: Lag, *, begin_s: float, end_s: float
) -> Summary:
    """Figures of the window from `begin_s` to `end_s`."""
    measured = [result for result in results if begin_s <= result.due_s < end_s]
    good = [result for result in measured if result.ok]
    met = [result for result in good if meets(result, objective)]
    window, chunks = max(1e-9, end_s - begin_s), sum(len(result.stamps_s) for result in good)
    flight = in_flight(results, begin_s=begin_s, end_s=end_s)
    return Summary(
        window_s=window,
        requests=len(measured),
        failed=len(measured) - len(good),
        errors=dict(Counter(result.error for result in measured if result.error).most_common()),
        ttft=latency_summary(result.ttft_s for result in good),
        tpot=latency_summary(result.tpot_s for result in good),
        itl=latency_summary(chain.from_iterable(result.gaps_s for result in good)),
        e2e=latency_summary(result.e2e_s for result in good),
        due_ttft=latency_summary(result.due_ttft_s for result in good),
        due_e2e=latency_summary(result.due_e2e_s for result in good),
        offered_per_s=len(measured) / window,
        requests_per_s=sum(result.ok and begin_s <= result.end_s < end_s for result in results) / window,
        tokens_in_per_s=sum(_begun(result, begin_s, end_s) for result in results) / window,
        tokens_out_per_s=sum(_arrived(result, begin_s, end_s) for result in results) / window,
        goodput_requests_per_s=len(met) / window,
        slo_met_fraction=len(met) / len(measured) if measured else 0.0,
        tokens_in=_mean(result.tokens_in for result in good),
        tokens_out=_mean(result.tokens_out for result in good),
        tokens_per_chunk=sum(result.tokens_out for result in good) / chunks if chunks else 0.0,
        counted_by=" and ".join(sorted({result.counted_by for result in good})) or "none",
        in_flight=sum(flight) / len(flight),
        lag=lag,
        backlog_growth=slope([i / len(flight) for i in range(len(flight))], flight),
    )


def meets(result: RequestResult, objective: Objective) -> bool:
    """Whether a request met every objective; its ITL is the 99th percentile of its own gaps. A response of one chunk
    has neither gaps nor a time per token; one without text misses an objective for TTFT."""
    checks = (
        (objective.ttft_p99_s, float("inf") if result.ttft_s is None else result.ttft_s),
        (objective.tpot_p99_s, result.tpot_s),
        (objective.e2e_p99_s, result.e2e_s),
        (objective.itl_p99_s, percentile(result.gaps_s, 99) if objective.itl_p99_s else None),
    )
    return result.ok and all(value <= limit for limit, value in checks if limit is not None and value is not None)


def in_flight(
    results: Sequence[RequestResult], *, begin_s: float, end_s: float, samples: int = _SAMPLES
) -> list[float]:
    """Requests in flight at evenly spaced times, from their due times to their ends."""
    due_times, end_times = sorted(result.due_s for result in results), sorted(result.end_s for result in results)
    times = [begin_s + (i + 0.5) * (end_s - begin_s) / samples for i in range(samples)]
    return [float(bisect_right(due_times, at) - bisect_right(end_times, at)) for at in times]


def _begun(result: RequestResult, begin_s: float, end_s: float) -> int:
    return (result.tokens_in or 0) if result.stamps_s and begin_s <= result.stamps_s[0] < end_s else 0


def _arrived(result: RequestResult, begin_s: float, end_s: float) -> float:
    """Tokens that arrived in the window; each chunk counts for an equal part of the completion."""
    if not result.stamps_s:
        return 0.0
    inside = sum(begin_s <= stamp < end_s for stamp in result.stamps_s)
    return inside * result.tokens_out / len(result.stamps_s)


def _mean(values: Iterable[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else 0.0
