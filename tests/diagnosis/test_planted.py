"""Planted problems: recorded ones here; real small runs, whose time is judged, with -m slow."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from armillary.errors import NotFound
from armillary.store.home import Home
from tests.planted import judge, recorded
from tests.planted.catalogue import PROBLEMS, chosen
from tests.planted.judge import counts, holds, judged
from tests.planted.problem import Problem, Wish
from tests.planted.quiet import STAT, Quiet
from tests.planted.sets import JUDGING, TUNING, set_of
from tests.planted.table import row, summary, summary_of_sets

LIVE = tuple(problem for problem in PROBLEMS if problem.live)
SIMULATED = tuple(problem for problem in PROBLEMS if problem.simulated)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home.at(tmp_path)


@pytest.mark.parametrize("problem", recorded.PROBLEMS, ids=lambda problem: problem.name)
def test_a_recorded_problem_is_named(problem: Problem, home: Home) -> None:
    verdict = judged(problem, Wish(), home)
    assert all(verdict.right.values()), row(verdict)


@pytest.mark.slow
@pytest.mark.parametrize("problem", LIVE, ids=lambda problem: problem.name)
def test_every_planted_problem_is_named(problem: Problem, home: Home) -> None:
    verdict = judged(problem, Wish(), home)
    assert all(verdict.right.values()), row(verdict)


@pytest.mark.parametrize("problem", SIMULATED, ids=lambda problem: problem.name)
def test_a_log_of_another_program_is_understood(problem: Problem, home: Home) -> None:
    verdict = judged(problem, Wish(seed=3), home)
    assert all(verdict.right.values()), row(verdict)


def test_a_wrong_verdict_is_counted_as_wrong(home: Home) -> None:
    (short,) = chosen(["gpu-short-kernels"])
    taken_for = Problem(name="else", says="", make=short.make, loop="training", causes=("bubble",), levers=("a.b",))
    verdicts = [judged(short, Wish(), home), judged(taken_for, Wish(), home)]
    assert counts(verdicts) == {"loop": (1, 2), "cause": (1, 2), "lever": (1, 2)}
    assert not holds(verdicts) and holds(verdicts[:1])
    assert summary(verdicts)[0] == "right loop 1 of 2 (needed 2)"
    assert row(verdicts[1])[-1] == "no: loop, cause, lever"
    assert summary_of_sets(verdicts)[0].startswith("tuning set (2 runs): right loop 1 of 2")


def test_every_recording_is_either_for_tuning_or_for_judging() -> None:
    names = {problem.name for problem in recorded.PROBLEMS} | set(recorded.MISSING)
    assert names == {*TUNING, *JUDGING} and not set(TUNING) & set(JUDGING)
    (graphs,) = chosen(["gpu-graphs"])
    assert set_of(graphs, Wish()) == "judging" and set_of(LIVE[0], Wish()) == "tuning"
    assert set_of(LIVE[0], Wish(seed=7)) == "judging"


def test_a_run_is_made_again_until_nothing_runs_beside_it(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    (short,) = chosen(["gpu-short-kernels"])
    made, taken = list[Path](), iter([0.9, 0.5, 0.02, 0.0])

    def make(wish: Wish, home: Home) -> Path:
        made.append(short.make(wish, home))
        return made[-1]

    monkeypatch.setattr(judge, "Quiet", lambda: SimpleNamespace(others=next(taken)))
    verdict = judged(replace(short, make=make, recorded=False), Wish(), home, times=5)
    assert len(made) == 3 and verdict.others == 0.02 and "cores taken" not in row(verdict)[1]


def test_what_others_compute_is_seen() -> None:
    quiet = Quiet()
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as beside:
        time.sleep(0.5)
        others = quiet.others
        beside.kill()
    assert others > 0.3 or not STAT.is_file()


def test_there_are_enough_problems_and_names_are_checked() -> None:
    ill = [problem for problem in PROBLEMS if not problem.healthy]
    assert len(ill) >= 18 and sum(not problem.recorded for problem in ill) >= 12
    assert sum(problem.healthy for problem in PROBLEMS) >= 4
    assert {problem.loop for problem in ill} == {"inner", "training", "product"}
    with pytest.raises(NotFound, match="did you mean slow-loader"):
        chosen(["slow-loder"])
