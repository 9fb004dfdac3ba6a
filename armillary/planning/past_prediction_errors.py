"""Past errors: how far the plans of earlier runs on this kind of device were from their measured step times."""

from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median

from armillary.errors import ArmillaryError
from armillary.spec.hardware import Chip
from armillary.spec.plan import Plan
from armillary.store.home import Home

MOST = 20
"""latest runs considered: older ones were planned by an older planner"""
STEPS, WARM_UP = 200, 2
"""steps considered, and the first ones left out"""


@dataclass(frozen=True, kw_only=True)
class Confidence:
    """Planned over measured step times, less 1."""

    errors: tuple[float, ...]

    def __str__(self) -> str:
        """'± 9 % on this kind of device (track record: 14 runs)'."""
        runs = f"{len(self.errors)} run{'s' if len(self.errors) > 1 else ''}"
        usual = median(abs(error) for error in self.errors)
        return f"± {usual:.0%} in the step on this kind of device (track record: {runs})".replace("%", " %")


def confidence(home: Home, chip: Chip) -> Confidence | None:
    """Of the latest training runs of a home; None where no run has measured a step on such a chip."""
    if not home.runs.is_dir():
        return None
    from armillary.store.runs import list_runs  # the store's locks and sockets are slow to import

    relative = (_error(run.plan, run.gauges, chip) for run in list_runs(home))
    errors = tuple(islice((error for error in relative if error is not None), MOST))
    return Confidence(errors=errors) if errors else None


def _error(plan: Path, gauges: Path, chip: Chip) -> float | None:
    """Planned over measured, less 1; None for a run that trained nothing, or on another chip."""
    from armillary.store.gauges import read_gauges

    try:
        record = Plan.from_json(plan.read_text(), str(plan))
        planned = record.predicted.get("step_s")
        if record.train is None or record.cluster.chip.name != chip.name or not planned:
            return None
        steps = [float(row["step_s"]) for row in islice(read_gauges(gauges), STEPS) if row.get("step_s")]
    except (OSError, ArmillaryError):  # a run that has just begun, or of another version
        return None
    return planned / median(steps[WARM_UP:]) - 1 if len(steps) > WARM_UP else None
