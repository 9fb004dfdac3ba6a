"""A load report as one HTML file that loads nothing: table, distributions, the test over time, rates tried, words."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from armillary.report.charts import SHARE_TICKS, lines, share_text
from armillary.report.page import document, heading, items, section, table
from armillary.serving.load.rate_search import Found
from armillary.serving.load.report_text import (
    DEFINITIONS,
    LATENCY_HEADS,
    TRIAL_HEADS,
    best_text,
    latency_rows,
    rate_rows,
    title_text,
    trial_rows,
)
from armillary.serving.load.run import LoadReport, Ran
from armillary.serving.load.summary import in_flight
from armillary.units import seconds_text

_SAMPLES = 120


def page(report: LoadReport, found: Found | None = None, usd_per_hour: float | None = None) -> str:
    """The whole document."""
    ran = report.runs[-1]
    parts = [
        heading(f"Load test of {report.model}", title_text(report)),
        section("Latency", table(LATENCY_HEADS, latency_rows(report))),
        section("Rates", table(("", ""), rate_rows(report, usd_per_hour), wide=True)),
        _search(found),
        _distributions(ran, len(report.runs)),
        _over_time(ran),
        section("Notes", items(report.notes)),
        section("What the figures mean", table(("", ""), list(DEFINITIONS.items()), wide=True)),
    ]
    return document(f"{report.model}: load test", parts)


def _search(found: Found | None) -> str:
    if found is None:
        return ""
    trials = sorted(found.trials, key=lambda trial: trial.requests_per_s)
    latencies = [
        ("TTFT p99", [(t.requests_per_s, t.summary.due_ttft.p99_s) for t in trials]),
        ("TTFT p50", [(t.requests_per_s, t.summary.due_ttft.p50_s) for t in trials]),
        ("ITL p99", [(t.requests_per_s, t.summary.itl.p99_s) for t in trials]),
    ]
    plot = lines(latencies, label="Latency over rate", x_name="requests per second", y_text=seconds_text)
    tokens = [(t.requests_per_s, t.summary.tokens_out_per_s) for t in trials]
    rates = lines([("output tokens per second", tokens)], label="Throughput over rate", x_name="requests per second")
    return section(best_text(found), plot + rates + table(TRIAL_HEADS, trial_rows(found)))


def _distributions(ran: Ran, repeats: int) -> str:
    good = [answer for answer in ran.answers if answer.ok and ran.begin_s <= answer.due_s < ran.end_s]
    firsts = [answer.ttft_s for answer in good if answer.ttft_s is not None]
    gaps = list(chain.from_iterable(answer.gaps_s for answer in good))
    plots = [
        lines(
            [(name, cumulative(values))],
            label=name,
            x_name=name,
            x_text=seconds_text,
            y_text=share_text,
            y_ticks=SHARE_TICKS,
        )
        for name, values in (("TTFT", firsts), ("ITL", gaps), ("end to end", [answer.e2e_s for answer in good]))
    ]
    which = f" (last of {repeats} runs)" if repeats > 1 else ""
    return section(f"Share of values that do not exceed{which}", "".join(plots)) if any(plots) else ""


def _over_time(ran: Ran) -> str:
    until = max((answer.end_s for answer in ran.answers), default=0.0)
    step = until / _SAMPLES
    under_way = [
        ((i + 0.5) * step, value)
        for i, value in enumerate(in_flight(ran.answers, begin_s=0.0, end_s=until, samples=_SAMPLES))
    ]
    stamps = [(stamp, answer.tokens_out / len(answer.stamps_s)) for answer in ran.answers for stamp in answer.stamps_s]
    tokens = counted([at for at, _ in stamps], [weight for _, weight in stamps], until=until)
    firsts = sorted((answer.due_s, answer.due_ttft_s) for answer in ran.answers if answer.due_ttft_s is not None)
    plots = [
        lines([("requests under way", under_way)], label="Requests under way over time", x_name="seconds"),
        lines([("output tokens per second", tokens)], label="Tokens over time", x_name="seconds"),
        lines([("TTFT by due time", firsts)], label="TTFT over time", x_name="seconds", y_text=seconds_text),
    ]
    return section(f"Over time (measured from {ran.begin_s:.1f} to {ran.end_s:.1f} s)", "".join(plots))


def cumulative(values: Sequence[float]) -> list[tuple[float, float]]:
    """(value, share of all that do not exceed it)."""
    ordered = sorted(values)
    return [(value, (i + 1) / len(ordered)) for i, value in enumerate(ordered)]


def counted(
    moments: Sequence[float], weights: Sequence[float], *, until: float, bins: int = 60
) -> list[tuple[float, float]]:
    """Weights per second, in `bins` equal parts of the time to `until`."""
    size = until / bins or 1.0
    sums = [0.0] * bins
    for moment, weight in zip(moments, weights, strict=True):
        if 0 <= moment < until:
            sums[min(bins - 1, int(moment / size))] += weight
    return [((i + 0.5) * size, total / size) for i, total in enumerate(sums)]
