"""Compare two runs: what a lever was predicted to buy, and what was obtained."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from armillary.diagnosis.diagnosis import FILE, read_diagnosis
from armillary.diagnosis.finding import Lever
from armillary.diagnosis.parts import parts_of
from armillary.diagnosis.read_run import read_run
from armillary.diagnosis.reading import Reading
from armillary.diagnosis.track_record import Kept, read_record, remember
from armillary.errors import BadInput
from armillary.spec.recipe import recipe_from_dict
from armillary.store.home import Home
from armillary.store.runs import Run

STEP = "step_s"
HARMLESS = frozenset({
    "train.steps", "train.warmup_steps", "train.seed", "train.lr", "train.track", "train.log_every",
    "train.profile_every", "data.seed", "data.verify",
})  # fmt: skip
"""keys that leave the time of a step as it is"""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One run against another."""

    a: str
    """the run before"""
    b: str
    """the run after"""
    of: str
    """the gauge that is compared"""
    before: float
    """its value in a"""
    after: float
    """its value in b"""
    obtained: float
    """speed-up: above 1 is better"""
    predicted: float | None = None
    """speed-up as it was predicted before; none where nobody predicted this change"""
    title: str = ""
    """the lever"""
    change: Mapping[str, Any]
    """keys of the recipe that differ, as they are in b"""

    @property
    def error(self) -> float | None:
        return abs(self.obtained / self.predicted - 1) if self.predicted else None


def compare(a: Run, b: Run, home: Home) -> Comparison:
    """What changed, what it brought, and what was predicted; a prediction's outcome is remembered."""
    if a.id == b.id:
        raise BadInput(f"run {a.name} cannot be compared with itself; name the run after the change")
    first, second = read_run(a, home), read_run(b, home)
    if first.kind != second.kind:
        raise BadInput(f"run {a.name} is {first.kind} and run {b.name} is {second.kind}; compare two of a kind")
    change = changes(a, b)
    told = _told(a, change, home, before=b.state.started)
    of = told.of if told else STEP if first.kind == "training" else _latency(first, second)
    before, after = measured(first, of), measured(second, of)
    if not before or not after:
        raise BadInput(f"{of} was not measured in both runs; compare runs that took some steps")
    obtained = after / before if is_rate(of) else before / after
    found = Comparison(a=a.id, b=b.id, of=of, before=before, after=after, obtained=obtained, change=change,
                       predicted=told.predicted if told else None, title=told.title if told else "")  # fmt: skip
    if told is not None:
        remember(home, replace(told, obtained=obtained, by=b.id))
    return found


def measured(reading: Reading, of: str) -> float | None:
    """The figure of a gauge; a step with all that comes between steps, since that is what levers are priced for."""
    parts = parts_of(reading) if of == STEP else None
    return parts.whole if parts is not None else reading.get(of)


def is_rate(gauge: str) -> bool:
    """Whether more is better."""
    return gauge.endswith("_per_s")


def changes(a: Run, b: Run) -> dict[str, Any]:
    """Keys whose values differ, defaults filled in, with b's value."""
    before, after = (_flat(run) for run in (a, b))
    return {key: value for key, value in after.items() if before.get(key) != value}


def _flat(run: Run) -> dict[str, Any]:
    from armillary.spec.fields import to_plain

    recipe = to_plain(recipe_from_dict(run.recipe))
    return {f"{table}.{key}": value for table, values in recipe.items() if isinstance(values, dict)
            for key, value in values.items()}  # fmt: skip


def _told(a: Run, change: Mapping[str, Any], home: Home, *, before: float) -> Kept | None:
    """What was predicted for this change before the other run began: by the lever that was applied, else by the run's
    diagnosis."""
    kept = [one for one in read_record(home) if one.run == a.id and _matches(one.change, change)]
    if (a.folder / FILE).is_file():
        at = (a.folder / FILE).stat().st_mtime
        levers = [lever for lever in read_diagnosis(a.folder).levers if _matches(lever.change, change)]
        kept += [as_kept(a, lever, at=at) for lever in levers if not kept]
    earlier = [one for one in kept if one.predicted_at <= before]
    return max(earlier, key=lambda one: (len(one.change), one.predicted_at), default=None)


def as_kept(run: Run, lever: Lever, *, recipe: str = "", at: float | None = None) -> Kept:
    """A lever as a prediction to be remembered."""
    return Kept(run=run.id, title=lever.title, change=dict(lever.change), of=lever.of, predicted=lever.speedup,
                predicted_at=time.time() if at is None else at, recipe=recipe)  # fmt: skip


def _matches(lever: Mapping[str, Any], change: Mapping[str, Any]) -> bool:
    """Whether all of a lever's keys were changed as it says, and no other that matters."""
    others = set(change) - set(lever) - HARMLESS
    return bool(lever) and not others and all(str(change.get(key)) == str(value) for key, value in lever.items())


def _latency(first: Reading, second: Reading) -> str:
    """What to hold two servers against where nobody predicted anything."""
    both = [name for name in ("tokens_out_per_s", "e2e_p50_s", "ttft_p50_s") if first.get(name) and second.get(name)]
    if not both:
        raise BadInput("the two runs have no figure in common; compare runs that answered requests")
    return both[0]
