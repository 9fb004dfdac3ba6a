"""What a training run took and what the planner says of its parts, for corrections (device_model/correction.py).

Our own runs bring their plan. A log of another program brings its recipe, as `armillary import` makes it of that
program's configuration; its step is planned with that program's settings, so that what it does differently from our
trainer is not taken for the cluster's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from armillary.errors import BadInput
from armillary.planning.device_model.correction import RunTime
from armillary.planning.device_model.frameworks import software
from armillary.planning.device_model.vectorised_layouts import as_arrays
from armillary.planning.training.resolve_recipe import TrainingProblem, resolve
from armillary.planning.training.step_time import StepTime, step_time
from armillary.spec.hardware import Cluster
from armillary.spec.model import ModelConfig
from armillary.spec.plan import Plan
from armillary.spec.recipe import Recipe, recipe_from_dict
from armillary.store.home import Home

FRAMEWORKS = {"torchtitan": "torchtitan", "megatron": "Megatron-LM", "hf-trainer": "HF Trainer"}
"""program of a log -> its name in frameworks.toml; one that is not there is planned from physics"""


@dataclass(frozen=True, kw_only=True)
class Described:
    """What another program ran, by the recipe that a person gives with its log or page."""

    recipe: Recipe
    model: ModelConfig
    cluster: Cluster


def run_time(name: str, measured_s: float, plan: Plan, home: Home) -> RunTime:
    """A run of ours: its recipe as it ran, planned by today's planner."""
    if plan.train is None:
        raise BadInput(f"{name} is no training run; calibrate with runs of armillary train, or logs with their recipes")
    recipe = replace(recipe_from_dict(plan.recipe), layout=plan.layout, train=plan.train)
    problem = resolve(recipe, plan.model, plan.cluster, home, is_run=True, is_corrected=False)
    return _planned(name, measured_s, problem)


def log_time(name: str, measured_s: float, by: str, described: Described, home: Home) -> RunTime:
    """A log of another program with the recipe that describes its run."""
    recipe = described.recipe
    problem = resolve(recipe, described.model, described.cluster, home, is_run=True, is_corrected=False)
    known = software(FRAMEWORKS.get(by, by), chip=problem.case.cluster.chip.name)
    return _planned(name, measured_s, replace(problem, case=replace(problem.case, software=known)))


def _planned(name: str, measured_s: float, problem: TrainingProblem) -> RunTime:
    return RunTime(
        name=name,
        measured_s=measured_s,
        planned=parts_of_step(step_time(problem.case, as_arrays([problem.layout]))),
    )


def parts_of_step(time: StepTime) -> dict[str, float]:
    """Seconds by part; they add up to the step."""
    return {
        "compute": float(time.compute[0] + time.bubble[0]),
        "communication": float(time.exposed[0]),
        "overhead": float(time.overhead[0]),
    }
