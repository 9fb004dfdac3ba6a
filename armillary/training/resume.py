"""Which run to go on with: the newest unfinished one of the same recipe, whatever hardware and layout it ran on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from armillary.errors import ArmillaryError, BadInput
from armillary.spec.plan import Plan
from armillary.spec.recipe import Recipe, recipe_from_dict, to_dict
from armillary.store.home import Home
from armillary.store.runs import Run, list_runs

FREE = ("hardware", "layout")
"""tables that may differ: a checkpoint goes on anywhere"""
_READING = ("data.cache", "data.cache_bytes", "data.verify", "data.workers")
"""keys that say how the text is read, not which: they may differ too"""
_ENDED = ("interrupted", "failed", "died")


def unfinished_run(home: Home, recipe: Recipe, weights: str) -> Run | None:
    """The newest run of this recipe, started from these weights, that nobody runs and that is not done; None where the
    newest one is done, or there is none."""
    for run in list_runs(home):
        if not differences(run, recipe, weights):
            state = run.state.shown
            if state in _ENDED:
                return run
            if state == "finished":
                return None
    return None


def differences(run: Run, recipe: Recipe, weights: str) -> list[str]:
    """Keys in which a run's recipe differs, like train.lr; what cannot be read differs in everything."""
    try:
        # read and written again, so that what a release spells anew is the same
        before, now = (_fixed(to_dict(each)) for each in (recipe_from_dict(run.recipe), recipe))
        plan = Plan.from_json(run.plan.read_text(), str(run.plan))
    except (ArmillaryError, OSError, KeyError) as error:
        return [str(error)]
    found = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
    if plan.train is None:
        found.append("what it did, which was to serve")
    return found + (["the weights it starts from"] if plan.weights != weights else [])


def _fixed(tables: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {f"{table}.{key}": value for table, keys in tables.items() if table not in FREE
            for key, value in keys.items() if f"{table}.{key}" not in _READING}  # fmt: skip


def check_same(run: Run, recipe: Recipe, weights: str) -> None:
    """Refuse to go on with a run that was something else, or that is done."""
    if run.state.shown == "finished":
        raise BadInput(f"run {run.name} is finished; leave --run out to start a new one")
    if others := differences(run, recipe, weights):
        raise BadInput(f"run {run.name} was started with another recipe ({', '.join(others[:3])} differs); "
                       "put that back, or leave --run out to start a new one")  # fmt: skip
