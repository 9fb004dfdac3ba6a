"""The demo report as a page: loss, step budget, roofline, latencies, levers, and every prediction checked.

The file stands alone: no script, no font, no address is loaded; it fits a phone.
"""

from html import escape

from armillary.diagnosis.evidence.finding import Lever, evidence_text, value_text
from armillary.diagnosis.evidence.thresholds import MIN_SPEEDUP
from armillary.diagnosis.outcome.compare import Comparison
from armillary.diagnosis.outcome.diagnosis import Diagnosis
from armillary.diagnosis.outcome.prediction_errors import HEADS
from armillary.diagnosis.report.demo_report import DemoReport, Service
from armillary.profiling.profile import Profile
from armillary.profiling.report.profile_page import budget_bar, roofline_chart
from armillary.report.bars import series_bars
from armillary.report.charts import lines
from armillary.report.page import Below, document, heading, items, section, table
from armillary.serving.load.run import LoadReport
from armillary.units import seconds_text

_LEVERS = 6
_LATENCIES = (
    ("Time to first token", "TTFT", "ttft"),
    ("Inter-token latency", "ITL", "itl"),
    ("End to end", "end to end", "e2e"),
)


def page(report: DemoReport) -> str:
    """The whole document."""
    seconds = sum(stage.seconds for stage in report.stages)
    parts = [heading(report.title, f"demo finished in {seconds_text(seconds)} · {report.created}")]
    parts += [_stages(report), _loss(report), _budget(report), _goodput(report), _roofline(report.profile)]
    parts += [_latency(report)]
    parts += [_diagnosis(diagnosis, report.pulled) for diagnosis in report.diagnoses]
    parts += [
        _pulled(report),
        _service(report.service),
        _predicted(report),
        section("Notes", items(report.notes, kind="note")),
    ]
    return document(f"{report.title}: demo", parts)


def _stages(report: DemoReport) -> str:
    rows = [[stage.name, seconds_text(stage.seconds), stage.said] for stage in report.stages]
    return section("Stages", table(["", "took", "result"], rows, wide=True) if rows else "")


# --- training


def _loss(report: DemoReport) -> str:
    losses = [
        (name, [(float(record["step"]) + 1, float(record[gauge])) for record in report.records if gauge in record])
        for name, gauge in (("loss", "loss"), ("held-out loss", "val_loss"))
    ]
    lowest = min((value for _, points in losses for _, value in points), default=0.0)
    marks = [(float(step), f"interrupted after step {step}, resumed") for step in report.stops]
    return section("Loss", lines(losses, label="Loss over steps", x_name="step", marks=marks, above=lowest))


def _budget(report: DemoReport) -> str:
    """Of the training run as its ranks recorded it; of the profiled step where they did not."""
    diagnosis = next(
        (candidate for candidate in report.diagnoses if candidate.kind == "training" and candidate.budget), None
    )
    reading = report.training
    step = reading.get("step_s") if reading else None
    if diagnosis is not None and step:
        bar = budget_bar(diagnosis.budget.items(), step) + _sum(diagnosis.budget.values())
        return section(f"Where a step of {seconds_text(step)} goes, on the main rank", bar)
    if report.profile is None:
        return ""
    profile = report.profile
    parts = {part: profile.fraction(part) for part in profile.budget}
    bar = budget_bar(parts.items(), profile.step_s)
    return section(f"Where a step of {seconds_text(profile.step_s)} goes, in one process", bar + _sum(parts.values()))


def _goodput(report: DemoReport) -> str:
    """Of the whole run, its restarts included."""
    account = report.training.goodput if report.training else None
    if account is None or not account.total_s:
        return ""
    bar = budget_bar([(name, share) for name, _, share in account.rows()], account.total_s)
    title = f"Where the {seconds_text(account.total_s)} of the run went: goodput {account.goodput_fraction:.0%}"
    faster = [[name, f"{share:.1%}", f"{speedup:.2f} ×"] for name, share, speedup in account.amdahl()]
    amdahl = table(["the whole job without it (Amdahl)", "share", "faster"], faster)
    return section(title, bar + _sum([share for _, _, share in account.rows()]) + amdahl)


def _sum(shares: object) -> str:
    assert hasattr(shares, "__iter__")
    return f"<div class='note'>together {100 * sum(shares):.1f} %</div>"


def _roofline(profile: Profile | None) -> str:
    chart = roofline_chart(profile, profile.kernels or profile.operators) if profile else ""
    if profile is None or not chart:
        return ""
    source = {"measured": "measured here", "catalogue": "the catalogue's", "unknown": "not known"}[
        profile.roofline.source
    ]
    note = f"<div class='note'>operators of one step, in one process; area is time; ceilings are {source}</div>"
    return section("Roofline", chart + note)


# --- serving


def _latency(report: DemoReport) -> str:
    servers = (("as set", report.served), ("lever applied", report.served_after))
    reports = [(name, load.load) for name, load in servers if load]
    if not reports:
        return ""
    plots = ""
    for label, short, name in _LATENCIES:
        rows = [
            (f"{short} {percent}", [_percentile(load, name, percent) for _, load in reports])
            for percent in ("p50", "p90", "p99")
        ]
        plots += series_bars(rows, [name for name, _ in reports], label=label, text=seconds_text)
    rates = "; ".join(f"{name}: {_rates(load)}" for name, load in reports)
    return section("Latency under load", f"{plots}<div class='note'>{escape(rates)}</div>")


def _percentile(report: LoadReport, name: str, percent: str) -> float:
    return float(getattr(getattr(report.last, name), f"{percent}_s"))


def _rates(report: LoadReport) -> str:
    last = report.last
    return (
        f"{last.offered_per_s:.3g} requests/s offered, {last.requests_per_s:.3g} completed, "
        f"{last.tokens_out_per_s:,.0f} tokens/s out, {last.failed} failed"
    )


def _service(service: Service | None) -> str:
    """Requests per replica, the promotion, and what the gateway adds."""
    if service is None:
        return ""
    rows = [(name, [float(requests)]) for name, requests in service.replicas]
    plot = series_bars(rows, ["requests"], label="Requests per replica", text=lambda value: f"{value:.0f} requests")
    last, (before, after) = service.load.last, service.releases
    added = [
        f"{seconds_text(value)} ({name})"
        for name, value in (("p50", service.added_p50_s), ("p99", service.added_p99_s))
        if value is not None
    ]
    facts = [
        f"{after} was promoted over {before} under load; all served it {seconds_text(service.promoted_s)} later",
        f"{last.requests} requests, {last.failed} failed; TTFT p50 {seconds_text(last.ttft.p50_s)}, "
        f"p99 {seconds_text(last.ttft.p99_s)}",
        f"a request is in the gateway for {' and '.join(added) or 'an unknown time'} before it is sent on",
    ]
    return section("As a service: registry, gateway and replicas", plot + items(facts))


# --- levers


def _diagnosis(diagnosis: Diagnosis, pulled: tuple[Comparison, ...]) -> str:
    evidence = diagnosis.findings[0].evidence if diagnosis.findings and not diagnosis.is_healthy else ()
    rows = [_lever_row(number, lever, pulled) for number, lever in enumerate(diagnosis.levers[:_LEVERS], 1)]
    levers = table(["", "lever", "predicted", "obtained"], rows, wide=True) if rows else ""
    inside = f"<p><b>{escape(diagnosis.headline)}</b></p>" + items(map(evidence_text, evidence), kind="note")
    return section(f"Diagnosis of {diagnosis.source}", inside + levers)


def _lever_row(number: int, lever: Lever, pulled: tuple[Comparison, ...]) -> list[str]:
    done = next(
        (comparison for comparison in pulled if comparison.title == lever.title and comparison.of == lever.of), None
    )
    risk = f"risk {lever.risk} · " if lever.speedup > MIN_SPEEDUP or lever.at_most is not None else "not worth it · "
    told = Below(lever.gain_text, "" if lever.of == "step_s" else f"in {lever.of}")
    return [
        f"{number}",
        Below(lever.title, risk + (lever.sets or lever.action)),
        told,
        f"{done.obtained:.2f} ×" if done else "–",
    ]


def _pulled(report: DemoReport) -> str:
    rows = [(comparison.title, [comparison.predicted, comparison.obtained]) for comparison in report.pulled]
    plot = series_bars(rows, ["predicted", "obtained"], label="Levers", text=lambda value: f"{value:.2f} ×")
    texts = [
        f"{comparison.title}: {comparison.of} {value_text(comparison.of, comparison.before)} → "
        f"{value_text(comparison.of, comparison.after)}"
        for comparison in report.pulled
    ]
    return section("Levers pulled: predicted and obtained", plot + items(texts, kind="note") if plot else "")


def _predicted(report: DemoReport) -> str:
    """A table for each thing that was planned, and one for the levers."""
    groups: dict[str, list[list[str]]] = {}
    for figure in report.predicted:
        of, gauge, predicted, measured, error = figure.cells()
        name = Below(gauge, of) if figure.is_speedup else gauge
        seen = measured if figure.measured is not None else Below("–", measured)
        groups.setdefault("levers" if figure.is_speedup else of, []).append([name, predicted, seen, error])
    inside = "".join(f"<h3>{escape(name)}</h3>{table(HEADS[1:], rows, wide=True)}" for name, rows in groups.items())
    return section("Predicted and measured: every figure that was predicted", inside)
