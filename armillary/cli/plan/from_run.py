"""`armillary plan --from RUN`: the recipe of a run with the lever pulled that its diagnosis puts first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from armillary.cli.output import Output
from armillary.store.home import Home

if TYPE_CHECKING:
    from armillary.diagnosis.outcome.diagnosis import Diagnosis
    from armillary.store.runs import Run


@dataclass(frozen=True, kw_only=True)
class Changed:
    """What is planned anew."""

    recipe: Mapping[str, Any]
    """the run's tables"""
    overrides: tuple[str, ...]
    """the lever, as --set takes it; none where nothing is worth changing"""
    purpose: str
    """train or serve: what the run did"""


def from_run(out: Output, home: Home, name: str) -> Changed:
    """The recipe that a run's diagnosis asks for; says which lever that is."""
    from armillary.diagnosis.evidence.thresholds import MIN_SPEEDUP
    from armillary.diagnosis.levers.apply import overrides_of
    from armillary.diagnosis.outcome.diagnosis import read_diagnosis
    from armillary.store.runs import find_run

    run = find_run(home, name)
    found = read_diagnosis(run.folder)
    worth = [lever for lever in found.levers if lever.change and lever.speedup > MIN_SPEEDUP and not found.is_healthy]
    lever = worth[0] if worth else None
    out.say(_pulled(found, run, found.levers.index(lever) + 1) if lever else f"{run.name} as it is: {found.headline}")
    return Changed(
        recipe=run.recipe,
        overrides=tuple(overrides_of(lever.change)) if lever else (),
        purpose="serve" if found.kind == "serving" else "train",
    )


def _pulled(found: Diagnosis, run: Run, number: int) -> str:
    lever = found.lever(number)
    return (
        f"{run.name} with lever {number} pulled: {lever.title} ({lever.sets}), predicted {lever.speedup:.2f} × in "
        f"{lever.of} on what was measured\napply:   armillary diagnose {run.name} --apply {number}"
    )
