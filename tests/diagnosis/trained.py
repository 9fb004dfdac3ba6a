"""Hand-made training runs for the rules: a real plan of the planner, and records as the trainer writes them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from armillary.diagnosis.readings.reading import Reading
from armillary.diagnosis.readings.run_folder import read_records
from armillary.planning.device_model.vectorised_layouts import as_arrays
from armillary.planning.training.layout_prediction import predict
from armillary.planning.training.resolve_recipe import resolve
from armillary.planning.training.training_plan import training_plan
from armillary.spec.gauges import budget_gauge
from armillary.spec.hardware import Cluster
from armillary.spec.plan import Plan
from armillary.spec.recipe import recipe_from_dict
from armillary.spec.toml.fields import to_plain
from armillary.store.gauges import GaugeWriter, Record
from armillary.store.home import Home
from armillary.store.runs import Run, create_run

NOWHERE = Home.at("/nonexistent")
BASE = {
    "model": {"name": "armillary-1b"},
    "hardware": {"on": "h100x8"},
    "layout": {"dp": 8, "micro_batch": 2},
    "train": {"sequence": 2048, "batch_tokens": 131_072, "steps": 40},
}
BUSY = {
    "useful": 0.5,
    "inefficiency": 0.4,
    "unjudged": 0.0,
    "comm_exposed": 0.0,
    "launch_gap": 0.05,
    "host": 0.03,
    "sync": 0.01,
    "idle": 0.01,
    "unknown": 0.0,
}
"""the budget of a step that computes"""


def plan_of(*sets: str, cluster: Cluster | None = None, home: Home = NOWHERE) -> Plan:
    """What the planner makes of the recipe with some keys changed."""
    recipe = recipe_from_dict(BASE, sets)
    asked = resolve(recipe, recipe.model_config(), recipe.cluster(cluster), home)
    made = training_plan(asked, predict(asked.case, as_arrays([asked.layout]))).plan()
    return replace(made, data=recipe.data)


def records(count: int = 20, *, window: dict[str, float] | None = None, **gauges: Any) -> list[Record]:
    """Steps of one second; a gauge is a number, or a function of the step that gives one or None. The tenth step is
    recorded."""
    found = []
    for step in range(count):
        record: Record = {"time": 1000.0 + step, "step": step, "step_s": 1.0, "data_wait_s": 0.0, "comm_exposed_s": 0.0}
        values = {name: value(step) if callable(value) else value for name, value in gauges.items()}
        record |= {name: value for name, value in values.items() if value is not None}
        if step == 9:
            record |= {budget_gauge(part): share for part, share in (window or BUSY).items()} | {"compute_s": 0.9}
        found.append(record)
    return found


def reading_of(plan: Plan | None = None, **made: Any) -> Reading:
    return read_records(records(**made), source="run made-up", plan=plan)


def run_of(home: Home, plan: Plan, *, name: str, text: str = "", **made: Any) -> Run:
    """A whole run folder with these records."""
    run = create_run(home, plan.recipe, text=text, plan=to_plain(plan), name=name)
    with GaugeWriter(Path(run.gauges)) as writer:
        for record in records(**made):
            gauges = {key: value for key, value in record.items() if key not in ("time", "step")}
            writer.write(gauges, step=record["step"], now=record["time"])
    return run
