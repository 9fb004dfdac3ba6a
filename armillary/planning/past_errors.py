"""Confidence: how far plans of earlier runs were from what those runs then measured, on this kind of device."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median

from armillary.errors import ArmillaryError
from armillary.spec.hardware import Chip
from armillary.spec.plan import Plan
from armillary.store.home import Home

MOST = 20
"""runs that are looked at, the latest: older ones were planned by an older planner"""
STEPS, WARM_UP = 200, 2
"""steps that are looked at, the first ones left out"""


@dataclass(frozen=True, kw_only=True)
class Confidence:
    """Planned over measured step times, less 1."""

    errors: tuple[float, ...]
    """one a run"""

    def __str__(self) -> str:
        """'± 9 % on this kind of device (track record: 14 runs)'."""
        runs = f"{len(self.errors)} run{'s' if len(self.errors) > 1 else ''}"
        usual = median(abs(error) for error in self.errors)
        return f"± {usual:.0%} in the step on this kind of device (track record: {runs})".replace("%", " %")


def confidence(home: Home, chip: Chip) -> Confidence | None:
    """Of the latest training runs of a home; None where none has measured a step on such a chip."""
    if not home.runs.is_dir():
        return None
    from armillary.store.runs import list_runs  # the store's locks and sockets are slow to import

    found = (_error(run.plan, run.gauges, chip) for run in list_runs(home))
    errors = tuple(islice((error for error in found if error is not None), MOST))
    return Confidence(errors=errors) if errors else None


def _error(plan: Path, gauges: Path, chip: Chip) -> float | None:
    """Planned over measured, less 1; None of a run that trained nothing, or on another chip."""
    from armillary.store.gauges import read_gauges

    try:
        made = Plan.from_json(plan.read_text(), str(plan))
        planned = made.predicted.get("step_s")
        if made.train is None or made.cluster.chip.name != chip.name or not planned:
            return None
        steps = [float(record["step_s"]) for record in islice(read_gauges(gauges), STEPS) if record.get("step_s")]
    except (OSError, ArmillaryError):  # a run that was only begun, or of another version
        return None
    return planned / median(steps[WARM_UP:]) - 1 if len(steps) > WARM_UP else None
