"""The rule behind `train.compile = "auto"`: whether compiling the blocks of a run pays off."""

import shutil
import sysconfig
from dataclasses import replace
from pathlib import Path

from armillary.planning.device_model.vectorised_layouts import as_arrays
from armillary.planning.training.layout_prediction import predict
from armillary.planning.training.resolve_recipe import TrainingProblem
from armillary.spec.layout_rules.case import Case
from armillary.spec.layout_rules.rules import layout_problems
from armillary.units import seconds_text

COMPILE_S = 90.0
"""assumed cost of compiling the blocks of a small model on two cores (not measured)"""
WORTH = 5.0
"""how often the saving must cover that cost"""


def compile_choice(problem: TrainingProblem) -> str:
    """Why blocks are compiled, in one line; empty where they are not: on a GPU, where our own kernels run instead; in
    short runs; where the layout or the machine does not allow it."""
    case, job = problem.case, problem.recipe.train
    if not case.software.eager_layers or not has_compiler() or not _is_allowed(problem):
        return ""
    eager, compiled = (
        predict(replace(case, compiled=way), as_arrays([problem.layout])).time.total[0] for way in (False, True)
    )
    saved = float(eager - compiled) * job.steps
    if saved < WORTH * COMPILE_S:
        return ""
    return (
        f"true: {float(eager / compiled):.2f} × predicted, which saves {seconds_text(saved)} over {job.steps:,} steps"
    )


def has_compiler() -> bool:
    """Whether torch can compile for this CPU: a C++ compiler and Python's headers are there."""
    headers = (Path(sysconfig.get_path("include")) / "Python.h").is_file()
    return headers and any(shutil.which(name) for name in ("c++", "g++", "clang++"))


def _is_allowed(problem: TrainingProblem) -> bool:
    job = problem.recipe.train
    rules = Case(
        model=problem.model, sequence=job.sequence, batch_tokens=job.batch_tokens, by_trainer=True, compiled=True
    )
    return not any(layout_problems(problem.layout, rules))
