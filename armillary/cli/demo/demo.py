"""`armillary demo`: measure, plan, train, serve, load, diagnose, apply a lever, measure again, run a service; then a
report."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from armillary.cli.demo.state import RECIPE, DemoState
from armillary.cli.output import Output, path_text
from armillary.cli.verb_decorator import set_option, verb
from armillary.store.home import Home
from armillary.units import seconds_text

if TYPE_CHECKING:
    from armillary.diagnosis.report.demo_report import DemoReport


SHOWN = (
    "step_s",
    "tokens_per_s",
    "memory_peak_bytes",
    "checkpoint_bytes",
    "ttft_p50_s",
    "itl_p50_s",
    "tokens_out_per_s",
    "kv_capacity_tokens",
)
"""predictions that the terminal shows; the page has all"""


@verb
@set_option
@click.option(
    "--page",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("armillary-demo.html"),
    show_default=True,
    help="File of the report.",
)
def demo(out: Output, home: Home, overrides: tuple[str, ...], page: Path) -> None:
    """Run the complete cycle on this machine: measure, plan, train, serve, load, diagnose, apply a lever, compare; then
    a service of two replicas behind a gateway, with a promotion under load.

    Needs no download and under five minutes: model, steps and traffic are sized by what this machine reaches. Ctrl-C
    ends it with a report of the finished stages; the same command resumes the training run.
    """
    from armillary.cli.demo import ceilings, levers, service_and_promotion, sizing
    from armillary.cli.demo import plan_and_train as training
    from armillary.cli.demo import serve_and_load as serving

    state = DemoState(out, home, overrides)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the server, too
    try:
        ceilings.measure(state)
        sizing.fit(state)
        run = training.train(state, training.plan(state))
        service = serving.serve_and_load(state, run)
        levers.diagnose(state, run, service)
        levers.apply(state, run, service)
        service_and_promotion.serve(state, run)
    except KeyboardInterrupt:
        _report(state, page)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
    _report(state, page)
    out.say(f"\ntraining run {run.name} · server {service.name} · what to do with them: docs/tour.md")
    out.result(_as_json(state.report, page) | {"run": run.id, "recipe": RECIPE.read_text()}, quiet=str(page))


def _report(state: DemoState, path: Path) -> None:
    """The page, and the table of predictions that it ends with; of an interrupted demo, the finished stages."""
    from armillary.diagnosis.outcome.prediction_errors import HEADS
    from armillary.diagnosis.report.demo_page import page
    from armillary.store.atomic import write_text

    with state.stage("report", "every figure that was predicted, beside what was measured") as say:
        rows = state.report.predicted
        shown = [row.cells() for row in rows if row.is_speedup or row.gauge in SHOWN]
        if shown:
            state.out.table("", HEADS, shown)
        checked = f"{sum(row.measured is not None for row in rows)} of {len(rows)} predictions were measured"
        state.out.say(f"{checked}; the report has all of them")
        say(checked)
    write_text(path.absolute(), page(state.report))
    seconds = sum(stage.seconds for stage in state.report.stages)
    state.out.say(f"demo finished in {seconds_text(seconds)} · report: {path_text(path.absolute())}")


def _as_json(report: DemoReport, path: Path) -> dict[str, Any]:
    return {
        "report": str(path),
        "seconds": sum(stage.seconds for stage in report.stages),
        "stages": report.stages,
        "stops": report.stops,
        "diagnoses": report.diagnoses,
        "pulled": report.pulled,
        "service": report.service
        and {
            "replicas": report.service.replicas,
            "releases": report.service.releases,
            "requests": report.service.load.last.requests,
            "failed": report.service.load.last.failed,
            "added_p50_s": report.service.added_p50_s,
            "added_p99_s": report.service.added_p99_s,
        },
        "predicted": [
            {"of": row.of, "gauge": row.gauge, "predicted": row.predicted, "measured": row.measured, "error": row.error}
            for row in report.predicted
        ],
    }
