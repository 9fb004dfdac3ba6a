"""A load report as one self-contained HTML file: tables, distributions, the test over time, the rates tried."""

from collections.abc import Sequence
from itertools import chain

from armillary.report.charts import SHARE_TICKS, lines, share_text
from armillary.report.page import document, heading, items, section, table
from armillary.serving.load.rate_search import SearchResult
from armillary.serving.load.report_text import (
    ATTEMPT_HEADS,
    DEFINITIONS,
    LATENCY_HEADS,
    attempt_rows,
    best_text,
    latency_rows,
    rate_rows,
    title_text,
)
from armillary.serving.load.run import LoadReport, RunResult
from armillary.serving.load.summary import in_flight
from armillary.units import seconds_text

_SAMPLES = 120


def page(report: LoadReport, search: SearchResult | None = None, usd_per_hour: float | None = None) -> str:
    """The complete document."""
    run = report.runs[-1]
    parts = [
        heading(f"Load test of {report.model}", title_text(report)),
        section("Latency", table(LATENCY_HEADS, latency_rows(report))),
        section("Rates", table(("", ""), rate_rows(report, usd_per_hour), wide=True)),
        _search(search),
        _distributions(run, len(report.runs)),
        _over_time(run),
        section("Notes", items(report.notes)),
        section("What the figures mean", table(("", ""), list(DEFINITIONS.items()), wide=True)),
    ]
    return document(f"{report.model}: load test", parts)


def _search(search: SearchResult | None) -> str:
    if search is None:
        return ""
    attempts = sorted(search.attempts, key=lambda attempt: attempt.requests_per_s)
    latencies = [
        ("TTFT p99", [(t.requests_per_s, t.summary.due_ttft.p99_s) for t in attempts]),
        ("TTFT p50", [(t.requests_per_s, t.summary.due_ttft.p50_s) for t in attempts]),
        ("ITL p99", [(t.requests_per_s, t.summary.itl.p99_s) for t in attempts]),
    ]
    plot = lines(latencies, label="Latency over rate", x_name="requests per second", y_text=seconds_text)
    tokens = [(t.requests_per_s, t.summary.tokens_out_per_s) for t in attempts]
    rates = lines([("output tokens per second", tokens)], label="Throughput over rate", x_name="requests per second")
    return section(best_text(search), plot + rates + table(ATTEMPT_HEADS, attempt_rows(search)))


def _distributions(run: RunResult, repeats: int) -> str:
    good = [result for result in run.results if result.ok and run.begin_s <= result.due_s < run.end_s]
    firsts = [result.ttft_s for result in good if result.ttft_s is not None]
    gaps = list(chain.from_iterable(result.gaps_s for result in good))
    plots = [
        lines(
            [(name, cumulative(values))],
            label=name,
            x_name=name,
            x_text=seconds_text,
            y_text=share_text,
            y_ticks=SHARE_TICKS,
        )
        for name, values in (("TTFT", firsts), ("ITL", gaps), ("end to end", [result.e2e_s for result in good]))
    ]
    which = f" (last of {repeats} runs)" if repeats > 1 else ""
    return section(f"Cumulative distribution{which}", "".join(plots)) if any(plots) else ""


def _over_time(run: RunResult) -> str:
    until = max((result.end_s for result in run.results), default=0.0)
    step = until / _SAMPLES
    in_flight_at = [
        ((i + 0.5) * step, value)
        for i, value in enumerate(in_flight(run.results, begin_s=0.0, end_s=until, samples=_SAMPLES))
    ]
    stamps = [(stamp, result.tokens_out / len(result.stamps_s)) for result in run.results for stamp in result.stamps_s]
    tokens = counted([at for at, _ in stamps], [weight for _, weight in stamps], until=until)
    firsts = sorted((result.due_s, result.due_ttft_s) for result in run.results if result.due_ttft_s is not None)
    plots = [
        lines([("requests in flight", in_flight_at)], label="Requests in flight over time", x_name="seconds"),
        lines([("output tokens per second", tokens)], label="Tokens over time", x_name="seconds"),
        lines([("TTFT by due time", firsts)], label="TTFT over time", x_name="seconds", y_text=seconds_text),
    ]
    return section(f"Over time (measured from {run.begin_s:.1f} to {run.end_s:.1f} s)", "".join(plots))


def cumulative(values: Sequence[float]) -> list[tuple[float, float]]:
    """(value, fraction of values up to it)."""
    ordered = sorted(values)
    return [(value, (i + 1) / len(ordered)) for i, value in enumerate(ordered)]


def counted(
    times: Sequence[float], weights: Sequence[float], *, until: float, bins: int = 60
) -> list[tuple[float, float]]:
    """Weights per second, in `bins` equal parts of the time to `until`."""
    size = until / bins or 1.0
    sums = [0.0] * bins
    for at, weight in zip(times, weights, strict=True):
        if 0 <= at < until:
            sums[min(bins - 1, int(at / size))] += weight
    return [((i + 0.5) * size, total / size) for i, total in enumerate(sums)]
