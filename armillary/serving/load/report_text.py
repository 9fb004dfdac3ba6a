"""A load report as text and table rows for terminal, page and JSON, and the definition of each figure."""

from collections import Counter
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

from armillary.serving.load.rate_search import SearchResult
from armillary.serving.load.run import LoadReport
from armillary.serving.load.schedule import warmup_s
from armillary.serving.load.summary import Summary
from armillary.spec.toml.fields import to_plain
from armillary.stats import Estimate, estimate
from armillary.units import dollars_text, seconds_text

HOUR_S = 3600.0

DEFINITIONS = {
    "TTFT": "request sent to first streamed text, including the time to open a connection",
    "ITL": "gap between consecutive streamed chunks of a request, over all gaps of all requests",
    "TPOT": "(end-to-end − TTFT) / (tokens − 1), one value per request; other programs call this ITL",
    "end to end": "request sent to last streamed text",
    "from due time": "the same from the scheduled send time: a generator that falls behind cannot hide waiting "
    "(coordinated omission)",
    "percentile": "the smallest value that at least that percentage of all values does not exceed",
    "throughput": "tokens that arrived, and requests completed, in the measured window, per second",
    "goodput": "requests per second, of those sent in the window, that met every objective; a request's "
    "ITL is the 99th percentile of its own gaps, and one without any text misses an objective for TTFT",
    "±": "95 % confidence interval over the repeats (Student's t); a percentile's is that of its mean over repeats",
    "sustained": "objectives hold at p99 from due times, no request fails, and requests in flight do not grow",
    "cost": "price per hour over tokens per hour at this load: prompts and completions together, and completions alone",
}

_LATENCIES = {
    "TTFT": "ttft",
    "ITL": "itl",
    "TPOT": "tpot",
    "end to end": "e2e",
    "TTFT from due time": "due_ttft",
    "end to end from due time": "due_e2e",
}
"""title -> field of Summary, which has an objective `FIELD_p99_s` where it is not from due times"""
LATENCY_HEADS = ("", "p50", "p90", "p95", "p99", "mean", "max", "SLO (p99)")


def over_runs(report: LoadReport, figure: Callable[[Summary], float]) -> Estimate:
    return estimate([figure(run.summary) for run in report.runs])


def latency_rows(report: LoadReport) -> list[list[str]]:
    """Rows of name, percentiles with their intervals, and objective."""
    rows = []
    for title, name in _LATENCIES.items():
        if getattr(report.last, name).count:
            keys = ("p50_s", "p90_s", "p95_s", "p99_s", "mean_s", "max_s")
            figures = {key: over_runs(report, attrgetter(f"{name}.{key}")) for key in keys}
            limit = getattr(report.test.objective, f"{name}_p99_s", None)
            rows.append([title, *map(_seconds, figures.values()), _slo(limit, figures["p99_s"].mean)])
    return rows


def narrow(heads: Sequence[str], rows: Sequence[Sequence[str]], *, repeats: int) -> tuple[list[str], list[list[str]]]:
    """Columns that fit a terminal: three percentiles only where there are intervals."""
    columns = [i for i, head in enumerate(heads) if repeats < 2 or head not in ("p95", "mean", "max")]
    return [heads[i] for i in columns], [[row[i] for i in columns] for row in rows]


def _slo(limit: float | None, p99_s: float) -> str:
    return "–" if limit is None else f"{seconds_text(limit)} {'✓' if p99_s <= limit else '✗'}"


def rate_rows(report: LoadReport, usd_per_hour: float | None = None) -> list[tuple[str, str]]:
    """Rows of throughput, goodput, errors and cost."""

    def rate(figure: Callable[[Summary], float], unit: str) -> str:
        return _number(over_runs(report, figure), unit)

    rows = [
        ("offered", rate(lambda s: s.offered_per_s, "requests/s")),
        ("completed", rate(lambda s: s.requests_per_s, "requests/s")),
        ("tokens out", rate(lambda s: s.tokens_out_per_s, "tokens/s")),
        ("tokens in", rate(lambda s: s.tokens_in_per_s, "tokens/s") if report.last.tokens_in else "not counted"),
        ("goodput", _goodput(report)),
        ("errors", errors_text(report)),
        ("request", _request_text(report.last)),
        ("in flight", f"{report.last.in_flight:.1f} requests on average"),
    ]
    if usd_per_hour is not None:
        rows.append(("cost", _cost_text(report, usd_per_hour)))
    rows.append(("generator", _lag_text(report.last)))
    return rows


def _goodput(report: LoadReport) -> str:
    rate = _number(over_runs(report, lambda s: s.goodput_requests_per_s), "requests/s") + " of those offered"
    share = over_runs(report, lambda s: s.slo_met_fraction).mean
    has_objective = any(value is not None for value in to_plain(report.test.objective).values())
    return (
        f"{rate} ({share:.1%} met every objective)"
        if has_objective
        else f"{rate} (no objective is set: all that succeeded)"
    )


def errors_text(report: LoadReport) -> str:
    failed, requests = (sum(getattr(run.summary, key) for run in report.runs) for key in ("failed", "requests"))
    why = sum((Counter(run.summary.errors) for run in report.runs), Counter[str]())
    reasons = "; ".join(f"{count:,} × {text}" for text, count in list(why.items())[:4])
    return f"{failed:,} of {requests:,} requests" + (f": {reasons}" if reasons else "")


def _request_text(summary: Summary) -> str:
    tokens_in = f"{summary.tokens_in:,.0f}" if summary.tokens_in else "?"
    return f"{tokens_in} tokens in, {summary.tokens_out:,.0f} out on average (counted by {summary.counted_by})"


def _lag_text(summary: Summary) -> str:
    lag = summary.lag
    return (
        f"{lag.cpu_fraction:.0%} of a core, loop {seconds_text(lag.loop_p99_s)} and sending "
        f"{seconds_text(max(0.0, lag.send_p99_s))} late at p99"
    )


def million_usd(summary: Summary, usd_per_hour: float) -> tuple[float | None, float | None]:
    """Dollars per million tokens in and out together, and per million tokens out."""
    both, out = summary.tokens_in_per_s + summary.tokens_out_per_s, summary.tokens_out_per_s
    if not out:
        return None, None
    return usd_per_hour / HOUR_S / both * 1e6, usd_per_hour / HOUR_S / out * 1e6


def _cost_text(report: LoadReport, usd_per_hour: float) -> str:
    both, out = million_usd(report.last, usd_per_hour)
    if both is None or out is None:
        return "no token arrived"
    price = dollars_text(usd_per_hour)
    return f"{_money(both)} per million tokens, {_money(out)} per million tokens out, at {price} per hour"


def _money(value: float) -> str:
    return dollars_text(value) if value >= 0.1 else f"${value:.4f}"


def title_text(report: LoadReport) -> str:
    """'tiny at http://…: open loop, poisson, 4 requests/s for 60 s after 6 s of warm-up, 3 repeats'."""
    load, traffic = report.test.load, report.test.traffic
    if load.trace:
        how = f"replay of {load.trace}" + (f" at {load.trace_speed:g} × speed" if load.trace_speed != 1 else "")
    elif load.concurrency:
        how = f"closed loop, {load.concurrency} client{'s' if load.concurrency > 1 else ''}"
    else:
        bursts = f" bursts of CV {traffic.burstiness:g}" if traffic.arrival == "gamma" else ""
        ramp = f" to {load.ramp_to:g}" if load.ramp_to else ""
        how = f"open loop, {traffic.arrival}{bursts}, {traffic.requests_per_s:.4g}{ramp} requests/s"
        if traffic.long_requests_per_s:
            how += f" beside {traffic.long_requests_per_s:.4g}/s of {traffic.long_tokens_in:,} tokens"
    length = f"{load.requests:,} requests" if load.requests else f"{traffic.duration_s:g} s"
    repeats = f", {len(report.runs)} repeats" if len(report.runs) > 1 else ""
    warm = warmup_s(traffic, load)
    return f"{report.model} at {report.url}: {how}, {length} after {warm:g} s of warm-up{repeats}"


ATTEMPT_HEADS = ("rate", "sustained", "TTFT p99", "ITL p99", "end to end p99", "tokens/s out", "why not")


def attempt_rows(search: SearchResult) -> list[list[str]]:
    return [
        [
            f"{attempt.requests_per_s:.4g}/s",
            "no" if attempt.violations else "yes",
            seconds_text(attempt.summary.due_ttft.p99_s),
            seconds_text(attempt.summary.itl.p99_s),
            seconds_text(attempt.summary.due_e2e.p99_s),
            f"{attempt.summary.tokens_out_per_s:,.0f}",
            "; ".join(attempt.violations) or "–",
        ]
        for attempt in sorted(search.attempts, key=lambda attempt: attempt.requests_per_s)
    ]


def best_text(search: SearchResult) -> str:
    if search.best is None:
        return f"no rate was sustained, down to {search.failed:.4g} requests/s"
    if search.failed is None:
        return f"highest rate tried, {search.best:.4g} requests/s, was sustained; the limit is above it"
    return f"highest sustainable rate {search.best:.4g} requests/s (at {search.failed:.4g} it was not)"


def plain(report: LoadReport, search: SearchResult | None = None, usd_per_hour: float | None = None) -> dict[str, Any]:
    """The report for --json, without the results of single requests."""
    both, out = million_usd(report.last, usd_per_hour) if usd_per_hour is not None else (None, None)
    table: dict[str, Any] = {
        "url": report.url,
        "model": report.model,
        "api": report.api,
        "traffic": to_plain(report.test.traffic),
        "load": to_plain(report.test.load),
        "objective": to_plain(report.test.objective),
        "runs": [to_plain(run.summary) for run in report.runs],
        "figures": _figures(report),
        "notes": list(report.notes),
        "million_tokens_usd": both,
        "million_tokens_out_usd": out,
        "definitions": DEFINITIONS,
    }
    if search is not None:
        table["search"] = {
            "highest_requests_per_s": search.best,
            "lowest_failed_requests_per_s": search.failed,
            "trials": [
                {
                    "requests_per_s": attempt.requests_per_s,
                    "broken": list(attempt.violations),
                    "summary": to_plain(attempt.summary),
                }
                for attempt in search.attempts
            ],
        }
    return table


def _figures(report: LoadReport) -> dict[str, Any]:
    """Gauge name -> mean over the repeats, and half-width of its interval."""
    latencies = {f"{name}_{p}_s": f"{name}.{p}_s" for name in _LATENCIES.values() for p in ("p50", "p90", "p95", "p99")}
    rates = ("requests_per_s", "tokens_in_per_s", "tokens_out_per_s", "goodput_requests_per_s", "slo_met_fraction")
    figures = latencies | {name: name for name in rates}
    return {name: to_plain(over_runs(report, attrgetter(path))) for name, path in figures.items()}


def _seconds(value: Estimate) -> str:
    text = seconds_text(value.mean)
    return text if value.half_width is None else f"{text} ± {seconds_text(value.half_width)}"


def _number(value: Estimate, unit: str) -> str:
    digits = ",.2f" if value.mean < 100 else ",.0f"
    interval = "" if value.half_width is None else f" ± {value.half_width:{digits}}"
    return f"{value.mean:{digits}}{interval} {unit}"
