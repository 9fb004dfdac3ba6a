"""Corrections of the planner by the user's own runs: a factor each for computation, communication and overhead.

A run says how long its step took, the planner says of what parts it consists. Factors are fitted to all runs together
in logarithms, with noise of each run and a prior around 1, so that few runs move them little, and a part that no run
has much of stays as planned (ridge regression, a Gaussian prior and Gaussian noise):

    minimise  Σ_runs (ln(Σ_k f_k · part_k) − ln measured)² / NOISE²  +  Σ_k (ln f_k)² / PRIOR²

Stored as corrections/CHIP.json beside the peaks, and used by later plans of trainings on that chip until it is
removed; what engine steps took corrects serving plans, and is in CHIP.serving.json.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any, Literal

import numpy as np

from armillary.errors import BadData, NotFound
from armillary.planning.device_model.vectorised_layouts import Array
from armillary.store import nan_safe_json
from armillary.store.home import Home

Work = Literal["training", "serving"]
PARTS = ("compute", "communication", "overhead")
"""computation and the bubbles it leaves; communication that it does not hide; optimizer, launches, waiting"""
PRIOR = 0.3
"""standard deviation of the logarithm of a factor before any run is seen: plans of other clusters are off by 8 to 15 %
on average (benchmarks/planning_accuracy.md) and single ones by half; a judgement"""
NOISE = 0.08
"""standard deviation of the logarithm of a run that a correct planner would predict: software versions and busy
machines; a judgement"""
ROUNDS = 20
"""Gauss-Newton steps; three suffice"""


@dataclass(frozen=True, kw_only=True)
class RunTime:
    """The step of one run, of a trainer or of an engine: as measured, and its parts as planned without corrections."""

    name: str
    measured_s: float
    planned: Mapping[str, float]
    """part of PARTS -> seconds"""

    def seconds(self, factors: Mapping[str, float]) -> float:
        """Its step with these factors."""
        return sum(factors.get(part, 1.0) * seconds for part, seconds in self.planned.items())

    def error(self, factors: Mapping[str, float]) -> float:
        """Planned over measured, less 1."""
        return self.seconds(factors) / self.measured_s - 1


@dataclass(frozen=True, kw_only=True)
class Correction:
    """Factors of a chip's plans, the runs they are from, and what they are worth."""

    chip: str
    work: Work = "training"
    """whose plans it corrects"""
    compute: float = 1.0
    communication: float = 1.0
    overhead: float = 1.0
    runs: tuple[str, ...] = ()
    date: str = ""
    error_before: float = 0.0
    """mean absolute error of these runs' plans without corrections"""
    error_left_out: float | None = None
    """the same of each run with factors of the others; None for a single run"""

    @property
    def factors(self) -> dict[str, float]:
        return {part: getattr(self, part) for part in PARTS}

    @property
    def helps(self) -> bool:
        """Whether runs that the fit had not seen came out nearer than without it; a single run cannot say."""
        return self.error_left_out is None or self.error_left_out < self.error_before

    @property
    def note(self) -> str:
        """What a corrected plan says of it."""
        return (
            f"corrected by {len(self.runs)} runs here ({self.date}): {self.text()}; "
            f"armillary plan calibrate --remove {self.chip} takes it back"
        )

    def text(self) -> str:
        """'computation × 1.12, overhead × 0.95'."""
        words = {"compute": "computation"}
        moved = {part: factor for part, factor in self.factors.items() if abs(factor - 1) >= 0.005}
        return ", ".join(f"{words.get(part, part)} × {factor:.2f}" for part, factor in moved.items()) or "nothing"


def fit_correction(chip: str, runs: Sequence[RunTime], work: Work = "training") -> Correction:
    """Factors of all runs, judged by leaving each out in turn."""
    factors = fit_factors(runs)
    left_out = [run.error(fit_factors([other for other in runs if other is not run])) for run in runs]
    return Correction(
        chip=chip,
        work=work,
        **factors,
        runs=tuple(run.name for run in runs),
        date=time.strftime("%Y-%m-%d", time.gmtime()),
        error_before=mean(abs(run.error({})) for run in runs),
        error_left_out=mean(map(abs, left_out)) if len(runs) > 1 else None,
    )


def fit_factors(runs: Sequence[RunTime]) -> dict[str, float]:
    """The most likely factors by the formula above."""
    parts = np.array([[run.planned.get(part, 0.0) for part in PARTS] for run in runs])
    measured = np.log([run.measured_s for run in runs])
    logs: Array = np.zeros(len(PARTS))
    for _ in range(ROUNDS if len(runs) else 0):
        scaled = parts * np.exp(logs)
        total = scaled.sum(axis=1)
        slopes = scaled / total[:, None]
        precision = slopes.T @ slopes / NOISE**2 + np.eye(len(PARTS)) / PRIOR**2
        gradient = slopes.T @ (measured - np.log(total)) / NOISE**2 - logs / PRIOR**2
        logs = logs + np.linalg.solve(precision, gradient)
    return {part: float(np.exp(value)) for part, value in zip(PARTS, logs, strict=True)}


# --- files


def folder(home: Home) -> Path:
    return home.cache / "corrections"


def save_correction(home: Home, correction: Correction) -> Path:
    from armillary.store.atomic import write_json  # the store's locks are slow to import

    path = _path(home, correction.chip, correction.work)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, asdict(correction))
    return path


def load_correction(home: Home, chip: str, work: Work = "training") -> Correction | None:
    """The stored correction of a chip's plans, if any."""
    path = _path(home, chip, work)
    return _read(path) if path.is_file() else None


def corrections(home: Home) -> list[Correction]:
    """All that are stored."""
    return [_read(path) for path in sorted(folder(home).glob("*.json"))]


def remove_corrections(home: Home, chip: str) -> list[Correction]:
    """Forget those of a chip."""
    both: tuple[Work, ...] = ("training", "serving")
    known = [each for work in both if (each := load_correction(home, chip, work)) is not None]
    if not known:
        chips = ", ".join(sorted({each.chip for each in corrections(home)})) or "none is stored"
        raise NotFound(f"no correction of {chip}; armillary plan calibrate lists them: {chips}")
    for each in known:
        _path(home, chip, each.work).unlink()
    return known


def _path(home: Home, chip: str, work: Work) -> Path:
    ending = ".json" if work == "training" else f".{work}.json"
    return folder(home) / (re.sub(r"[^A-Za-z0-9._-]+", "-", chip).strip("-") + ending)


def _read(path: Path) -> Correction:
    try:
        values: dict[str, Any] = nan_safe_json.loads(path.read_text())
        loaded = Correction(**{**values, "runs": tuple(values["runs"])})
        broken = not all(0.1 < factor < 10 for factor in loaded.factors.values())
    except (ValueError, TypeError, KeyError):
        broken = True
    if broken:
        raise BadData(f"{path} is not a correction; delete it and run armillary plan calibrate again")
    return replace(loaded, chip=loaded.chip or path.stem)
