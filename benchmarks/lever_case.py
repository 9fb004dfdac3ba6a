"""One lever, pulled: a run, what is predicted for it, the run with the lever, and what it brought.

The prediction is written down (diagnosis.json and the track record) before the changed recipe is run. The first run is
made again afterwards, so that a machine that got slower or quicker meanwhile does not pass for the lever.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from armillary.cli.diagnose import write_lever
from armillary.cli.output import Output
from armillary.diagnosis.compare import compare, is_rate, measured
from armillary.diagnosis.diagnose import diagnose
from armillary.diagnosis.diagnosis import Diagnosis
from armillary.diagnosis.keep import keep
from armillary.diagnosis.read_run import read_run
from armillary.errors import NotFound
from armillary.spec.recipe import Recipe, load_recipe
from armillary.store.home import Home
from armillary.store.runs import Run

ALLOWED, SHARE = 0.03, 0.3
"""how far what is obtained may be from what was predicted: this much, or this share of the predicted gain"""
STEADY, ROUNDS = 0.05, 3
"""where the machine itself changed by more than this meanwhile, the lever is pulled again, so often at most; the
steadiest round counts, whatever it shows"""


@dataclass(frozen=True, kw_only=True)
class LeverCase:
    """A recipe with something to gain, and the lever that gains it."""

    name: str
    """of the lever: 'batch size'"""
    key: str
    """the key that it changes"""
    recipe: Recipe
    """before"""
    run: Callable[[Recipe, Home], Run]
    """makes a run of a recipe, the same but for the recipe each time"""


@dataclass(frozen=True, kw_only=True)
class Pulled:
    """What was predicted, and what came of it."""

    name: str
    """of the lever"""
    change: str
    """as --set takes it"""
    of: str
    """the gauge"""
    predicted: float
    """speed-up, written down before"""
    obtained: float
    """speed-up, measured"""
    drift: float
    """the first run made again over the first time: what the machine itself changed by"""
    where: str
    """device"""
    rounds: int = 1
    """how often it was pulled until the machine was steady; the steadiest counts"""

    @property
    def allowed(self) -> float:
        return max(ALLOWED, SHARE * (self.predicted - 1))

    @property
    def within(self) -> bool:
        return abs(self.obtained - self.predicted) <= self.allowed

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @staticmethod
    def read(path: Path) -> Pulled:
        return Pulled(**json.loads(path.read_text()))


def pull(case: LeverCase, home: Home, *, where: str) -> Pulled:
    """Run, predict, change, run, and run again as at first."""
    before = case.run(case.recipe, home)
    found = diagnose(read_run(before, home), home)
    keep(before, found, home)
    number = number_of(found, case.key)
    path = write_lever(Output("silent"), home, found, before, number, home.work / f"{before.name}.toml")
    lever, changed = found.lever(number), load_recipe(path)
    after = case.run(changed, home)
    compare(before, after, home)
    rounds = [_round(lever.of, before, after, case.run(case.recipe, home), home)]
    while abs(rounds[-1].drift - 1) > STEADY and len(rounds) < ROUNDS:
        first, then, last = (case.run(recipe, home) for recipe in (case.recipe, changed, case.recipe))
        rounds.append(_round(lever.of, first, then, last, home))
    best = min(rounds, key=lambda one: abs(one.drift - 1))
    return Pulled(name=case.name, change=lever.sets, of=lever.of, predicted=lever.speedup, obtained=best.obtained,
                  drift=best.drift, where=where, rounds=len(rounds))  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Round:
    """Before, after, and before again."""

    obtained: float
    drift: float


def _round(of: str, before: Run, after: Run, again: Run, home: Home) -> _Round:
    """The run with the lever held against the mean of those before and after it."""
    first, then, last = (measured(read_run(run, home), of) for run in (before, after, again))
    assert first and then and last, f"{of} was measured"
    usual = (first + last) / 2
    return _Round(obtained=then / usual if is_rate(of) else usual / then, drift=last / first)


def number_of(found: Diagnosis, key: str) -> int:
    """The best lever that changes `key`."""
    numbers = [i for i, lever in enumerate(found.levers, 1) if key in lever.change]
    if not numbers:
        there = ", ".join(lever.sets or lever.title for lever in found.levers) or "none"
        raise NotFound(f"no lever changes {key} ({found.headline}; there are {there}); plant a problem that has one")
    return max(numbers, key=lambda number: found.lever(number).speedup)
