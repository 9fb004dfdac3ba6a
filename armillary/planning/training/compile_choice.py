"""Whether compiling a run's blocks pays: the rule behind `train.compile = "auto"`."""

from __future__ import annotations

import shutil
import sysconfig
from dataclasses import replace
from pathlib import Path

from armillary.errors import ArmillaryError
from armillary.planning.device_model.layout_arrays import of
from armillary.planning.training.prediction import predict
from armillary.planning.training.resolve import Question
from armillary.spec.layout_rules.rules import check_layout
from armillary.units import seconds_text

COMPILE_S = 90.0
"""what compiling the blocks of a small model is taken to cost on two cores: assumed, not measured"""
WORTH = 5.0
"""times that, from which compiling is done unasked"""


def compile_choice(asked: Question) -> str:
    """Why blocks are compiled, in one line; empty where they are not: on a GPU, where our own kernels run instead; in
    runs that are too short; where the layout or the machine does not allow it."""
    case, job = asked.case, asked.recipe.train
    if not case.software.plain_layers or not has_compiler() or not _is_allowed(asked):
        return ""
    plain, compiled = (predict(replace(case, compiled=way), of([asked.layout])).time.total[0] for way in (False, True))
    saved = float(plain - compiled) * job.steps
    if saved < WORTH * COMPILE_S:
        return ""
    gain = float(plain / compiled)
    return f"true: {gain:.2f} × predicted, which saves {seconds_text(saved)} over {job.steps:,} steps"


def has_compiler() -> bool:
    """Whether torch can compile for this CPU: a C++ compiler and Python's headers."""
    headers = (Path(sysconfig.get_path("include")) / "Python.h").is_file()
    return headers and any(shutil.which(name) for name in ("c++", "g++", "clang++"))


def _is_allowed(asked: Question) -> bool:
    job = asked.recipe.train
    try:
        check_layout(
            asked.layout,
            asked.model,
            sequence=job.sequence,
            batch_tokens=job.batch_tokens,
            by_trainer=True,
            compiled=True,
        )
    except ArmillaryError:
        return False
    return True
