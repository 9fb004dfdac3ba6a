"""A load report in words and rows, the same for terminal, page and JSON; and what each figure means."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from armillary.serving.load.rate_search import Found
from armillary.serving.load.run import LoadReport
from armillary.serving.load.schedule import warmup_s
from armillary.serving.load.summary import Spread, Summary
from armillary.spec.tables.serve import Objective
from armillary.spec.toml.fields import to_plain
from armillary.stats import Estimate, estimate
from armillary.units import dollars_text, seconds_text

HOUR_S = 3600.0

DEFINITIONS = {
    "TTFT": "request sent to first streamed text; a connection that has to be opened first is part of it",
    "ITL": "gap between consecutive streamed pieces of a request, all gaps of all requests together",
    "TPOT": "(end-to-end − TTFT) / (tokens − 1), one value a request; other programs call this ITL",
    "end to end": "request sent to last streamed text",
    "from due time": "the same from when the request should have been sent: a generator that falls behind cannot hide "
    "waiting (coordinated omission)",
    "percentile": "the smallest value that at least so many percent of all values do not exceed",
    "throughput": "tokens that arrived while it was measured, a second; requests completed in that time, a second",
    "goodput": "requests a second that met every objective; a request's ITL is the 99th percentile of its own gaps, "
    "and one without any text meets none for its first",
    "±": "95 % confidence interval over the repeats (Student's t); a percentile's is that of its mean over repeats",
    "sustained": "objectives hold at p99 counted from due times, nothing fails, and requests under way do not grow",
    "cost": "price of an hour over the tokens of an hour at this load; prompts and answers together, and answers alone",
}

_LATENCIES: tuple[tuple[str, str, Callable[[Summary], Spread], Callable[[Objective], float | None]], ...] = (
    ("TTFT", "ttft", lambda s: s.ttft, lambda o: o.ttft_p99_s),
    ("ITL", "itl", lambda s: s.itl, lambda o: o.itl_p99_s),
    ("TPOT", "tpot", lambda s: s.tpot, lambda o: o.tpot_p99_s),
    ("end to end", "e2e", lambda s: s.e2e, lambda o: o.e2e_p99_s),
    ("TTFT from due time", "due_ttft", lambda s: s.due_ttft, lambda o: None),
    ("end to end from due time", "due_e2e", lambda s: s.due_e2e, lambda o: None),
)
LATENCY_HEADS = ("", "p50", "p90", "p95", "p99", "mean", "max", "SLO (p99)")


def over_runs(report: LoadReport, figure: Callable[[Summary], float]) -> Estimate:
    return estimate([figure(ran.summary) for ran in report.runs])


def latency_rows(report: LoadReport) -> list[list[str]]:
    """Name, percentiles with their intervals, objective."""
    rows = []
    for title, _, spread_of, limit_of in _LATENCIES:
        if not spread_of(report.last).count:
            continue

        def cell(key: str, of: Callable[[Summary], Spread] = spread_of) -> str:
            return _seconds(over_runs(report, lambda summary: getattr(of(summary), key)))

        figures = [cell(key) for key in ("p50_s", "p90_s", "p95_s", "p99_s", "mean_s", "max_s")]
        rows.append([title, *figures, _slo(limit_of(report.test.objective), spread_of, report)])
    return rows


def narrow(heads: Sequence[str], rows: Sequence[Sequence[str]], *, repeats: int) -> tuple[list[str], list[list[str]]]:
    """Columns that fit a terminal: with intervals, only three percentiles."""
    kept = [i for i, head in enumerate(heads) if repeats < 2 or head not in ("p95", "mean", "max")]
    return [heads[i] for i in kept], [[row[i] for i in kept] for row in rows]


def _slo(limit: float | None, spread_of: Callable[[Summary], Spread], report: LoadReport) -> str:
    if limit is None:
        return "–"
    p99 = over_runs(report, lambda summary: spread_of(summary).p99_s).mean
    return f"{seconds_text(limit)} {'✓' if p99 <= limit else '✗'}"


def rate_rows(report: LoadReport, usd_per_hour: float | None = None) -> list[tuple[str, str]]:
    """Throughput, goodput, errors, cost."""

    def rate(figure: Callable[[Summary], float], unit: str) -> str:
        return _number(over_runs(report, figure), unit)

    rows = [
        ("offered", rate(lambda s: s.offered_per_s, "requests/s")),
        ("completed", rate(lambda s: s.requests_per_s, "requests/s")),
        ("tokens out", rate(lambda s: s.tokens_out_per_s, "tokens/s")),
        ("tokens in", rate(lambda s: s.tokens_in_per_s, "tokens/s") if report.last.tokens_in else "not counted"),
        ("goodput", _goodput(report)),
        ("errors", errors_text(report)),
        ("a request", _request_text(report.last)),
        ("under way", f"{report.last.in_flight:.1f} requests on average"),
    ]
    if usd_per_hour is not None:
        rows.append(("cost", _cost_text(report, usd_per_hour)))
    rows.append(("generator", _lag_text(report.last)))
    return rows


def _goodput(report: LoadReport) -> str:
    rate = _number(over_runs(report, lambda s: s.goodput_requests_per_s), "requests/s")
    share = over_runs(report, lambda s: s.slo_met_fraction).mean
    asked = any(value is not None for value in to_plain(report.test.objective).values())
    return f"{rate} ({share:.1%} met every objective)" if asked else f"{rate} (no objective is set: all that succeeded)"


def errors_text(report: LoadReport) -> str:
    failed, requests = (sum(getattr(ran.summary, key) for ran in report.runs) for key in ("failed", "requests"))
    why: dict[str, int] = {}
    for ran in report.runs:
        for text, count in ran.summary.errors.items():
            why[text] = why.get(text, 0) + count
    told = "; ".join(f"{count:,} × {text}" for text, count in list(why.items())[:4])
    return f"{failed:,} of {requests:,} requests" + (f": {told}" if told else "")


def _request_text(found: Summary) -> str:
    tokens_in = f"{found.tokens_in:,.0f}" if found.tokens_in else "?"
    return f"{tokens_in} tokens in, {found.tokens_out:,.0f} out on average (counted by {found.counted_by})"


def _lag_text(found: Summary) -> str:
    lag = found.lag
    return (
        f"{lag.cpu_fraction:.0%} of a core, loop {seconds_text(lag.loop_p99_s)} and sending "
        f"{seconds_text(max(0.0, lag.send_p99_s))} late at p99"
    )


def million_usd(found: Summary, usd_per_hour: float) -> tuple[float | None, float | None]:
    """(a million tokens in and out together, a million tokens out), in dollars."""
    both, out = found.tokens_in_per_s + found.tokens_out_per_s, found.tokens_out_per_s
    if not out:
        return None, None
    return usd_per_hour / HOUR_S / both * 1e6, usd_per_hour / HOUR_S / out * 1e6


def _cost_text(report: LoadReport, usd_per_hour: float) -> str:
    both, out = million_usd(report.last, usd_per_hour)
    if both is None or out is None:
        return "no token came"
    price = dollars_text(usd_per_hour)
    return f"{_money(both)} a million tokens, {_money(out)} a million tokens out, at {price} an hour"


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
    length = f"{load.requests:,} requests" if load.requests else f"{traffic.duration_s:g} s"
    repeats = f", {len(report.runs)} repeats" if len(report.runs) > 1 else ""
    warm = warmup_s(traffic, load)
    return f"{report.model} at {report.url}: {how}, {length} after {warm:g} s of warm-up{repeats}"


TRIAL_HEADS = ("rate", "sustained", "TTFT p99", "ITL p99", "end to end p99", "tokens/s out", "why not")


def trial_rows(found: Found) -> list[list[str]]:
    return [
        [
            f"{trial.requests_per_s:.4g}/s",
            "no" if trial.broken else "yes",
            seconds_text(trial.summary.due_ttft.p99_s),
            seconds_text(trial.summary.itl.p99_s),
            seconds_text(trial.summary.due_e2e.p99_s),
            f"{trial.summary.tokens_out_per_s:,.0f}",
            "; ".join(trial.broken) or "–",
        ]
        for trial in sorted(found.trials, key=lambda trial: trial.requests_per_s)
    ]


def best_text(found: Found) -> str:
    if found.best is None:
        return f"no rate was sustained, down to {found.failed:.4g} requests/s"
    if found.failed is None:
        return f"highest rate tried, {found.best:.4g} requests/s, was sustained; the limit is above it"
    return f"highest sustainable rate {found.best:.4g} requests/s (at {found.failed:.4g} it was not)"


def plain(report: LoadReport, found: Found | None = None, usd_per_hour: float | None = None) -> dict[str, Any]:
    """The report for --json; raw answers are left out."""
    both, out = million_usd(report.last, usd_per_hour) if usd_per_hour is not None else (None, None)
    answer: dict[str, Any] = {
        "url": report.url,
        "model": report.model,
        "api": report.api,
        "traffic": to_plain(report.test.traffic),
        "load": to_plain(report.test.load),
        "objective": to_plain(report.test.objective),
        "runs": [to_plain(ran.summary) for ran in report.runs],
        "figures": _figures(report),
        "notes": list(report.notes),
        "million_tokens_usd": both,
        "million_tokens_out_usd": out,
        "definitions": DEFINITIONS,
    }
    if found is not None:
        answer["search"] = {
            "highest_requests_per_s": found.best,
            "lowest_failed_requests_per_s": found.failed,
            "trials": [
                {
                    "requests_per_s": trial.requests_per_s,
                    "broken": list(trial.broken),
                    "summary": to_plain(trial.summary),
                }
                for trial in found.trials
            ],
        }
    return answer


def _figures(report: LoadReport) -> dict[str, Any]:
    """Gauge name -> mean over the repeats and half of its interval."""
    found: dict[str, Any] = {}
    for _, base, spread_of, _ in _LATENCIES:
        for percent in (50, 90, 95, 99):
            key, of = f"p{percent}_s", spread_of
            found[f"{base}_p{percent}_s"] = to_plain(over_runs(report, lambda s, of=of, key=key: getattr(of(s), key)))  # type: ignore[misc]
    for name in ("requests_per_s", "tokens_in_per_s", "tokens_out_per_s", "goodput_requests_per_s", "slo_met_fraction"):
        found[name] = to_plain(over_runs(report, lambda s, name=name: getattr(s, name)))  # type: ignore[misc]
    return found


def _seconds(value: Estimate) -> str:
    text = seconds_text(value.mean)
    return text if value.half_width is None else f"{text} ± {seconds_text(value.half_width)}"


def _number(value: Estimate, unit: str) -> str:
    digits = ",.2f" if value.mean < 100 else ",.0f"
    text = f"{value.mean:{digits}}" + ("" if value.half_width is None else f" ± {value.half_width:{digits}}")
    return f"{text} {unit}"
