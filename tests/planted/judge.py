"""Judge: make a problem's run, diagnose it as `armillary diagnose` does, and hold what is said against the truth."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from armillary.diagnosis.diagnose import diagnose, rules_for
from armillary.diagnosis.evidence.finding import Lever, Rule
from armillary.diagnosis.outcome.diagnosis import Diagnosis
from armillary.diagnosis.readings.open_reading import open_reading
from armillary.diagnosis.readings.reading import Reading
from armillary.diagnosis.rules import (
    clocks,
    device,
    gateway,
    goodput,
    job_attempts,
    scraped_server,
    service_log,
    serving,
    training,
    training_logs,
    wasted_work,
)
from armillary.errors import ArmillaryError
from armillary.store.home import Home
from armillary.store.runs import Run
from tests.planted.problem import ACTION, Problem, Wish
from tests.planted.quiet import LOUD, Quiet
from tests.planted.sets import Set, set_of

NEEDED = {"loop": 39 / 40, "cause": 37 / 40, "lever": 34 / 40}
"""share of the problems in which each must be right; no healthy run may be called ill"""
_TRAINING = (device, clocks, training, goodput, wasted_work, training_logs, job_attempts)
_SERVICES = (serving, scraped_server, service_log, gateway)
ALL_RULES: dict[str, Rule] = {
    f"{rule.__module__.rpartition('.')[2]}.{rule.__name__}": rule
    for module in (*_TRAINING, *_SERVICES)
    for rule in module.RULES
}
"""module.rule -> rule, of all kinds of readings"""
TIMES = 2
"""that a run is made at most, where something else computes on the machine meanwhile"""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What was said of one problem."""

    problem: Problem
    found: Diagnosis
    seconds: float
    """to make the run and diagnose it"""
    others: float = 0.0
    """cores that other programs had meanwhile"""
    of_set: Set = "tuning"
    """whether thresholds may have been set on this run"""

    fired: frozenset[str] = frozenset()
    """rules that found what was named"""

    @property
    def lever(self) -> Lever | None:
        """The one that stands first."""
        return self.found.levers[0] if self.found.levers and not self.found.is_healthy else None

    @property
    def changes(self) -> tuple[str, ...]:
        """Keys that the first lever changes; of another program's lever its flag."""
        if self.lever is None:
            return ()
        if self.problem.simulated:
            return (re.split(r"[ =]", self.lever.action, maxsplit=1)[0], "*")
        return tuple(self.lever.change) or (ACTION,)

    @property
    def right(self) -> dict[str, bool]:
        """loop, cause and lever; of a healthy run only that nothing was found."""
        problem = self.problem
        if problem.healthy:
            return {"healthy": self.found.is_healthy}
        loop = self.found.loop == problem.loop
        cause = loop and self.found.cause in problem.causes
        lever = cause and bool(set(self.changes) & set(problem.levers))
        return {"loop": loop, "cause": cause, "lever": lever}


def judged(problem: Problem, wish: Wish, home: Home, *, times: int = 1) -> Verdict:
    """The run made, up to so many times until it was quiet meanwhile, and the quietest diagnosed."""
    begin, made = time.monotonic(), list[tuple[float, Path]]()
    while not made or (made[-1][0] > LOUD and len(made) < times):
        quiet = Quiet()
        folder = problem.make(wish, home)
        _refuse_unfinished(problem, folder)
        made.append((quiet.others if problem.live and not problem.disturbed else 0.0, folder))
    others, folder = min(made)
    reading = open_reading(str(folder), home)
    found = diagnose(reading, home)
    return Verdict(
        problem=problem,
        found=found,
        seconds=time.monotonic() - begin,
        others=others,
        of_set=set_of(problem, wish),
        fired=frozenset(name for name, rule in ALL_RULES.items() if _finds(rule, reading, found.cause)),
    )


def _refuse_unfinished(problem: Problem, folder: Path) -> None:
    """A signal from outside ends a run early, and a step of warm-up is then all that could be judged."""
    state = Run(folder=folder).state.state if problem.live else "finished"
    if state != "finished":
        raise ArmillaryError(f"{problem.name}: {folder} was {state}; let it run to its end")


def _finds(rule: Rule, reading: Reading, cause: str | None) -> bool:
    if rule not in rules_for(reading):
        return False
    finding = rule(reading, reading.plan)
    return finding is not None and finding.cause == cause


def counts(verdicts: Sequence[Verdict]) -> dict[str, tuple[int, int]]:
    """What was right of how many: loop, cause, lever, and healthy runs left alone."""
    found = {}
    for name in (*NEEDED, "healthy"):
        of = [verdict.right[name] for verdict in verdicts if name in verdict.right]
        if of:
            found[name] = (sum(of), len(of))
    return found


def holds(verdicts: Sequence[Verdict]) -> bool:
    """Whether enough was right, and nothing healthy called ill."""
    needed = NEEDED | {"healthy": 1.0}
    return all(right >= needed[name] * of - 1e-9 for name, (right, of) in counts(verdicts).items())
