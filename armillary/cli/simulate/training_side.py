"""`armillary simulate --for train`: a training run's pipeline, and its weeks with failures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from armillary.cli.output import Output, path_text
from armillary.store.home import Home

if TYPE_CHECKING:
    from armillary.planning.simulation.training_case import SimulatedPlan


def simulated_training(home: Home, recipe: Path, overrides: tuple[str, ...]) -> SimulatedPlan:
    """The recipe's layout, priced and played through."""
    from armillary.cli.plan.plan import priced
    from armillary.planning.simulation.training_case import simulated_plan
    from armillary.planning.training.training_plan import training_plan

    asked = {"recipe": recipe, "model": None, "on": None, "sequence": None, "batch_tokens": None, "lora": None}
    problem, prediction, _ = priced(Output("quiet"), home, {**asked, "overrides": overrides})
    return simulated_plan(training_plan(problem, prediction), problem.recipe.faults)


def simulate_training(
    out: Output, home: Home, recipe: Path, overrides: tuple[str, ...], page: Path | None, trace: Path | None
) -> None:
    """Say it, and write the page and the trace."""
    from armillary.planning.simulation.training_page import run_rows, step_rows, training_page, training_trace
    from armillary.store.atomic import write_text

    with out.progress("simulating"):
        plan = simulated_training(home, recipe, overrides)
        gauges = plan.gauges
    layout = plan.planned.prediction.layout()
    title = plan.planned.problem.model.name
    out.say(f"{title} · {layout.num_devices:,} devices · {plan.run.now_s / 86_400:.1f} days")
    out.fields("a step", step_rows(plan))
    out.fields("the run", run_rows(plan))
    if page is not None:
        write_text(page, training_page(plan, title))
        out.say(f"wrote {path_text(page)}")
    if trace is not None:
        write_text(trace, json.dumps(training_trace(plan)))
        out.say(f"wrote {path_text(trace)}: open it in https://ui.perfetto.dev")
    out.result({"gauges": gauges}, quiet=f"{gauges['goodput_fraction']:.4f}")
