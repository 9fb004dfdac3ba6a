"""A simulated service as one self-contained HTML file."""

from __future__ import annotations

from armillary.planning.simulation.curve_outcome import Outcome
from armillary.planning.simulation.fleet_outcome import FleetOutcome
from armillary.report.charts import SHARE_TICKS, lines, share_text
from armillary.report.page import document, heading, items, paragraph, section, table
from armillary.units import seconds_text

LATENCIES = {
    "ttft": "time to first token",
    "itl": "inter-token latency",
    "tpot": "time per output token",
    "e2e": "end to end",
    "queue": "queue",
}


def latency_rows(outcome: Outcome) -> list[tuple[str, ...]]:
    """Name, p50, p90, p99."""
    gauges = outcome.gauges
    rows: list[tuple[str, ...]] = [
        (name, *(seconds_text(gauges[f"{key}_p{percent}_s"]) for percent in (50, 90, 99)))
        for key, name in LATENCIES.items()
        if f"{key}_p50_s" in gauges
    ]
    if isinstance(outcome, FleetOutcome) and outcome.long_ttfts:
        rows.insert(1, ("of long prompts", *map(seconds_text, outcome.long_ttfts.values())))
    return rows


def rate_rows(outcome: Outcome) -> list[tuple[str, str]]:
    """Rates, goodput, losses and cost."""
    run, gauges = outcome.run, outcome.gauges
    rows = [
        ("requests", f"{outcome.requests:,} in {seconds_text(run.end_s)}"),
        ("output tokens per second", f"{gauges.get('tokens_out_per_s', 0.0):,.0f}"),
        ("goodput", f"{gauges.get('goodput_requests_per_s', 0.0):.3g} requests/s"),
        ("objectives met", f"{outcome.slo_fraction:.2%} of requests"),
        ("replicas", f"{gauges['replicas']:.2f} on average, {gauges['replica_hours']:.3g} replica hours"),
        ("busy", f"{gauges.get('busy_fraction', 0.0):.0%} of that time"),
    ]
    if "prefix_hit_fraction" in gauges:
        rows.append(("prefix cache", f"{gauges['prefix_hit_fraction']:.1%} of prompt tokens"))
    names = {"broken": "broken streams", "unserved": "no replica"}
    rows += [(names.get(name, name), f"{count:,}") for name, count in outcome.losses.items() if count]
    if "usd" in gauges:
        million = gauges.get("usd_per_million_tokens_out")
        per = f", ${million:.3g} per million output tokens" if million is not None else ""
        rows.append(("cost", f"${gauges['usd']:.4g}{per}"))
    return rows


def page(outcome: Outcome, title: str, *, notes: tuple[str, ...] = ()) -> str:
    """The complete document."""
    case = outcome.case
    below = f"{case.fleet.policy} routing, step times: {case.cost.basis}"
    parts = [
        heading(f"Simulation of {title}", below),
        section("Latency", table(("", "p50", "p90", "p99"), latency_rows(outcome))),
        section("Rates and cost", table(("", ""), rate_rows(outcome), wide=True)),
        section("Over time", _over_time(outcome)),
        section("Distribution of TTFT", _ttft(outcome)),
        section("Scaling decisions", _decisions(outcome)),
        section("Notes", items(notes) or paragraph(f"{outcome.started:,} replicas were started.")),
    ]
    return document(f"{title}: simulation", parts)


def _over_time(outcome: Outcome) -> str:
    samples = outcome.run.timeline
    series = {
        "replicas": (
            ("ready", [(look.now, look.ready) for look in samples]),
            ("ready and starting", [(look.now, look.ready + look.starting) for look in samples]),
        ),
        "requests": (
            ("in flight", [(look.now, look.in_flight) for look in samples]),
            ("waiting", [(look.now, look.waiting) for look in samples]),
        ),
    }
    plots = [lines(each, label=f"{name} over time", x_name="seconds") for name, each in series.items()]
    used = [(look.now, look.kv_used) for look in samples]
    plots.append(
        lines([("KV cache used", used)], label="KV cache", x_name="seconds", y_text=share_text, y_ticks=SHARE_TICKS)
    )
    return "".join(plots)


def _ttft(outcome: Outcome) -> str:
    return lines(
        [("TTFT", outcome.ttfts)],
        label="TTFT",
        x_name="TTFT",
        x_text=seconds_text,
        y_text=share_text,
        y_ticks=SHARE_TICKS,
    )


def _decisions(outcome: Outcome) -> str:
    rows = [
        (seconds_text(decision.now), str(decision.before), str(decision.replicas), decision.reason)
        for _, decision in outcome.run.decisions
        if decision.change
    ]
    return table(("at", "before", "replicas", "reason"), rows, wide=True) if rows else ""
