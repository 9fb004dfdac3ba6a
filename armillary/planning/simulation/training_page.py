"""A simulated training run as rows of text, as one HTML file, and as a Chrome trace."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from armillary.planning.simulation.simulated_pipeline import Played, idle_fraction, seconds
from armillary.planning.simulation.training_case import SimulatedPlan
from armillary.report.charts import lines
from armillary.report.page import document, heading, paragraph, section, table
from armillary.units import dollars_text, seconds_text

MOST_PASSES = 3000
"""passes that a picture has; a step with more is drawn up to there"""
_WIDTH, _ROW = 1000.0, 22.0
_FILLS = {"F": "one", "B": "two", "I": "two", "W": "three"}
_NAMES = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}
_LOST = {"stragglers": "slow devices", "repeated": "repeated steps"}
_DAY = 86_400.0
_US = 1e6


def step_rows(plan: SimulatedPlan) -> list[tuple[str, str]]:
    """The step: its pipeline, and what a slow device does to it."""
    pipeline, played = plan.pipeline, plan.played
    planned_s = float(plan.planned.prediction.time.total[0])
    shape = f"{len(pipeline.stages)} stages of {pipeline.chunks} chunks, {pipeline.micro_batches} micro-batches"
    return [
        ("schedule", f"{pipeline.schedule}, {shape}"),
        ("pipeline", f"{seconds_text(seconds(played))}, stages idle {idle_fraction(played, len(pipeline.stages)):.1%}"),
        ("step", f"{seconds_text(plan.step_s)}; {seconds_text(planned_s)} by the plan's formula"),
        ("with one slow device", f"{seconds_text(plan.slow_step_s)}, {plan.slow_step_s / plan.step_s - 1:+.0%}"),
    ]


def run_rows(plan: SimulatedPlan) -> list[tuple[str, str]]:
    """The weeks: goodput and what was lost to what."""
    gauges, run = plan.gauges, plan.run
    rows = [
        ("run", f"{run.steps:,} of {run.case.steps:,} steps in {run.now_s / _DAY:.1f} days"),
        ("goodput", f"{gauges['goodput_fraction']:.1%}; {plan.goodput.goodput_fraction:.1%} by Daly's formula"),
        ("failures", f"{run.failures}, one in {seconds_text(run.case.mtbf_s)} expected"),
        ("checkpoints", f"every {run.case.interval_steps:,} steps, {seconds_text(run.case.checkpoint_s)} each"),
        *((f"lost to {_LOST.get(name, name)}", f"{share:.2%}") for name, share in run.lost().items()),
        ("tokens per second", f"{gauges['tokens_per_s']:,.0f}"),
    ]
    if run.stragglers:
        rows.insert(3, ("slow devices", f"{run.stragglers}"))
    if "usd" in gauges:
        rows.append(("cost", dollars_text(gauges["usd"])))
    return rows


def training_page(plan: SimulatedPlan, title: str) -> str:
    """The complete document."""
    run = plan.run
    points, steps = [(0.0, 0.0)], 0
    for span in run.spans:
        steps += span.steps
        points.append((span.end_s / _DAY, float(steps)))
    ideal = [(0.0, 0.0), (run.now_s / _DAY, run.now_s / run.case.step_s)]
    series = [("done", points), ("without losses", ideal)]
    step = table(("", ""), step_rows(plan), wide=True) + _picture(plan.played, len(plan.pipeline.stages))
    return document(
        f"{title}: simulated training",
        [
            heading(f"Simulated training of {title}", f"{plan.planned.prediction.layout().num_devices:,} devices"),
            section("A step", step),
            section("The run", table(("", ""), run_rows(plan), wide=True)),
            section("Steps over time", lines(series, label="steps done", x_name="days")),
        ],
    )


def _picture(played: list[Played], stages: int) -> str:
    """Passes over time, a row per stage."""
    if stages == 1:
        return ""
    shown = played[:MOST_PASSES]
    scale = _WIDTH / max(each.end_s for each in shown)
    boxes = "".join(_box(each, scale) for each in shown)
    size = f"viewBox='0 0 {_WIDTH:g} {stages * _ROW:g}'"
    names = "Blue: forward; orange: backward; teal: gradients of weights. A row per stage; gaps are idle."
    return f"<svg {size} role='img' aria-label='passes of every stage in a step'>{boxes}</svg>{paragraph(names)}"


def _box(each: Played, scale: float) -> str:
    width = max(0.3, (each.end_s - each.begin_s) * scale - 0.4)
    place = f"x='{each.begin_s * scale:.1f}' y='{each.stage * _ROW:.0f}' width='{width:.1f}' height='{_ROW - 4:.0f}'"
    return f"<rect {place} fill='var(--{_FILLS[each.work.kind]})'/>"


def training_trace(plan: SimulatedPlan) -> dict[str, Any]:
    """Chrome's trace format: a process with the pipeline of a step, and one with the weeks."""
    return {"displayTimeUnit": "ms", "traceEvents": list(_events(plan))}


def _events(plan: SimulatedPlan) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "one step"}}
    for each in plan.played:
        name = f"{_NAMES[each.work.kind]} {each.work.batch}"
        sizes = {"chunk": each.work.chunk, "micro-batch": each.work.batch}
        yield _slice(name, 1, each.stage, each.begin_s, each.end_s, sizes)
    yield {"ph": "M", "name": "process_name", "pid": 2, "args": {"name": "the run"}}
    for span in plan.run.spans:
        name = f"{span.what}, a device is slow" if span.slow else span.what
        yield _slice(name, 2, 0, span.begin_s, span.end_s, {"steps": span.steps})


def _slice(name: str, pid: int, tid: int, begin: float, end: float, args: dict[str, int]) -> dict[str, Any]:
    place = {"pid": pid, "tid": tid, "ts": begin * _US, "dur": max(0.0, end - begin) * _US}
    return {"ph": "X", "name": name, **place, "args": args}
