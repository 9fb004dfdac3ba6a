"""One lever, pulled: a run, what is predicted for it, the run with the lever, and what it brought.

The prediction is written down (diagnosis.json and the track record) before the changed recipe is run. Runs with and
without the lever take turns, so that a machine that gets slower or quicker meanwhile does not pass for the lever.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median

from armillary.cli.diagnose import write_lever
from armillary.cli.output import Output
from armillary.diagnosis.diagnose import diagnose
from armillary.diagnosis.evidence.finding import Lever
from armillary.diagnosis.evidence.step_parts import parts_of
from armillary.diagnosis.outcome.compare import STEP, compare, is_rate, measured
from armillary.diagnosis.outcome.diagnosis import Diagnosis, save
from armillary.diagnosis.readings.reading import Reading
from armillary.diagnosis.readings.run_folder import read_run
from armillary.errors import NotFound
from armillary.spec.recipe import Recipe, load_recipe
from armillary.store.home import Home
from armillary.store.runs import Run

ALLOWED, SHARE = 0.05, 0.25
"""how far what is obtained may be from what was predicted: this much, or this share of the predicted gain. Written down
on 2026-11-18, before the runs that it judges: twelve levers on CPU and H200, each at two sizes, 20 of 24 within"""
FEWEST, MOST, STEADY = 2, 3, 0.05
"""how often the lever is pulled: until what it brought lies so close together, between so and so often"""
DISTURBED, ATTEMPTS = 1.25, 2
"""what runs without the lever may differ by, the slowest over the quickest: where they do by more, the machine is not
what it was when the prediction was made, and all is done once more; the steadier of the two counts, whatever came"""
WAITS = 0.04
"""share of a run's time from which on its steps wait for data"""


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
    where: str
    """device"""
    rounds: int = 1
    """how often it was pulled"""
    spread: float = 0.0
    """what single pulls brought: the best less the worst, as a share of the median"""
    drift: float = 1.0
    """the last run without the lever over the first: what the machine itself changed by"""
    unsteady: float = 1.0
    """the slowest run without the lever over the quickest"""
    note: str = ""
    """what a reader must know of how this figure came about"""

    @property
    def allowed(self) -> float:
        return max(ALLOWED, SHARE * (self.predicted - 1))

    @property
    def within(self) -> bool:
        return abs(self.obtained - self.predicted) <= self.allowed

    def text(self) -> str:
        """One line."""
        said = {key: round(value, 3) if isinstance(value, float) else value for key, value in asdict(self).items()}
        return json.dumps(said | {"within": self.within})

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @staticmethod
    def read(path: Path) -> Pulled:
        return Pulled(**json.loads(path.read_text()))


def pull(case: LeverCase, home: Home, *, where: str, most: int = MOST) -> Pulled:
    """Run, predict, then by turns with the change and without; at most so often. Once more where the machine changed
    meanwhile."""
    found: list[Pulled] = []
    while not found or (found[-1].unsteady > DISTURBED and len(found) < ATTEMPTS):
        found.append(_pulled(case, home, where, most))
    return min(found, key=lambda one: one.unsteady)


def _pulled(case: LeverCase, home: Home, where: str, most: int) -> Pulled:
    before = case.run(case.recipe, home)
    lever, changed = _predicted(case, before, home)
    off, on, gains = [read_run(before, home)], list[Reading](), list[float]()
    while len(gains) < min(FEWEST, most) or (_spread(gains) > STEADY and len(gains) < most):
        after = case.run(changed, home)
        if not gains:
            compare(before, after, home)
        on.append(read_run(after, home))
        off.append(read_run(case.run(case.recipe, home), home))
        gains.append(_gain(lever.of, off[-2:], on[-1:]))
    each = [figure(lever.of, [run]) for run in off]
    return Pulled(
        name=case.name,
        change=lever.sets,
        of=lever.of,
        predicted=lever.speedup,
        where=where,
        obtained=_gain(lever.of, off, on),
        rounds=len(gains),
        spread=_spread(gains),
        drift=each[-1] / each[0],
        unsteady=max(each) / min(each),
    )


def _predicted(case: LeverCase, before: Run, home: Home) -> tuple[Lever, Recipe]:
    """The lever, written down and kept, and the recipe that it makes."""
    found = diagnose(read_run(before, home), home)
    save(before, found, home)
    number = number_of(found, case.key)
    path = write_lever(Output("silent"), home, found, before, number, home.work / f"{before.name}.toml")
    return found.lever(number), load_recipe(path)


def _spread(gains: list[float]) -> float:
    return (max(gains) - min(gains)) / median(gains)


def _gain(of: str, off: Sequence[Reading], on: Sequence[Reading]) -> float:
    waits = any(parts.share(parts.data_wait) > WAITS for run in (*off, *on) if (parts := parts_of(run)) is not None)
    now, then = (figure(of, runs, waits=waits) for runs in (off, on))
    return then / now if is_rate(of) else now / then


def figure(of: str, runs: Sequence[Reading], *, waits: bool = False) -> float:
    """Of several runs of one recipe: the mean, which turns make fair. Of steps that wait for nothing the quickest tenth
    of all of them, since whatever else a machine does only ever adds time."""
    each = [found for run in runs if (found := measured(run, of))]
    assert len(each) == len(runs), f"{of} was measured"
    steps = sorted(seconds for run in runs for seconds in run.series(STEP))
    return steps[len(steps) // 10] if of == STEP and steps and not waits else mean(each)


def number_of(found: Diagnosis, key: str) -> int:
    """The best lever that changes `key`."""
    numbers = [i for i, lever in enumerate(found.levers, 1) if key in lever.change]
    if not numbers:
        there = ", ".join(lever.sets or lever.title for lever in found.levers) or "none"
        raise NotFound(f"no lever changes {key} ({found.headline}; there are {there}); plant a problem that has one")
    return max(numbers, key=lambda number: found.lever(number).speedup)
