"""Checkpoints nobody asked for: every ten minutes as planned, rarely enough to cost nothing, the last three kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from armillary.spec.recipe import Recipe
from armillary.spec.tables.train import TrainJob
from armillary.store.goodput import account_of
from armillary.store.home import Home
from armillary.store.run_events import RunEvent
from armillary.store.runs import Run, create_run
from armillary.training.checkpoint.checkpoint import prune, saved_steps
from armillary.training.checkpoint.interval import APART, EVERY_S, SaveClock, interval_steps
from armillary.training.checkpoint.retention import Policy
from armillary.training.loop import train
from armillary.training.prepare_run import ResolvedRun, model_source, resolve_run
from armillary.training.telemetry.step_telemetry import StepReport
from tests.ranks import Ranks
from tests.training.test_many_ranks import on_ranks

Make = Callable[..., Recipe]


class Clock:
    """A clock that a test moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def walk(job: TrainJob, predicted_s: float | None, *, step_s: float, steps: int, save_s: float = 0.0) -> list[int]:
    """Numbers of steps done when a checkpoint was written, where each step and each save takes so long."""
    time, found = Clock(), []
    clock = SaveClock(job, predicted_s, now=time)
    for step in range(steps):
        due = clock.is_due(step)
        time.now += step_s
        if due:
            time.now += save_s
            clock.saved(save_s)
            found.append(step + 1)
    return found


def test_ten_minutes_of_predicted_time() -> None:
    assert walk(TrainJob(), 300.0, step_s=300.0, steps=9) == [2, 4, 6, 8]
    assert walk(TrainJob(), 60.0, step_s=60.0, steps=41) == [10, 20, 30, 40]


@pytest.mark.parametrize("predicted_s", [0.5, 200.0, None])
def test_what_is_measured_corrects_the_plan(predicted_s: float | None) -> None:
    found = walk(TrainJob(), predicted_s, step_s=5.0, steps=500)
    gaps = [b - a for a, b in pairwise(found) if a > 10]
    assert set(gaps) == {120}, "600 s of 5 s each, whatever was planned"
    assert found[0] <= 120, "a plan that was too quick does not put the first one off"


def test_saves_are_fifty_times_their_own_cost_apart() -> None:
    found = walk(TrainJob(), 1.0, step_s=1.0, steps=5000, save_s=30.0)
    assert found[0] == EVERY_S and {b - a for a, b in pairwise(found)} == {APART * 30}


def test_explicit_intervals_mean_what_they_did() -> None:
    assert walk(TrainJob(save_every=4), 1000.0, step_s=1000.0, steps=9) == [4, 8]
    assert walk(TrainJob(save_every=0), 1000.0, step_s=1000.0, steps=9) == []
    assert interval_steps(TrainJob(save_every=4), 1.0) == 4 and interval_steps(TrainJob(save_every=0), 1.0) == 0
    assert interval_steps(TrainJob(steps=1000), 2.0) == 300 and interval_steps(TrainJob(steps=200), 2.0) == 0


# --- pruning


def kept(run: Run, *steps: int) -> None:
    for step in steps:
        run.checkpoint(step).mkdir()
        (run.checkpoint(step) / "manifest.json").write_text('{"files": {"data": 2}}')
        (run.checkpoint(step) / "data").write_text("ok")


def test_the_last_whole_ones_stay(tmp_path: Path) -> None:
    run = create_run(Home.at(tmp_path), {})
    kept(run, 1, 2, 3, 4, 5)
    (run.checkpoint(3) / "data").write_text("")
    assert prune(run, Policy(last=3), 5) == [1, 3] and run.checkpoint_steps() == [2, 4, 5], (
        "what is cut short counts for nothing"
    )
    assert prune(run, Policy(last=0), 5) == [] and prune(run, Policy(last=7), 5) == []
    assert [path.name for path in (run.folder / "checkpoints").iterdir() if path.name.startswith(".")] == []


def test_the_only_good_one_never_goes(tmp_path: Path) -> None:
    run = create_run(Home.at(tmp_path), {})
    kept(run, 1, 2)
    (run.checkpoint(2) / "manifest.json").unlink()
    assert prune(run, Policy(last=1), 2) == [], "the newer one has no seal"
    kept(run, 3, 9)
    assert prune(run, Policy(last=1), 3) == [1, 2] and run.checkpoint_steps() == [3, 9], (
        "9 is of a past that was passed over"
    )


# --- whole runs


def begin(recipe: Recipe, home: Home, step_s: float) -> ResolvedRun:
    """A run that is planned to take so long a step."""
    begun = resolve_run(recipe, home, model_source(recipe, home), cpu_ranks=4)
    begun.prepare()
    return replace(begun, plan=replace(begun.plan, predicted={"step_s": step_s}))


class Crash(Exception):
    """What ends a run without warning."""


def test_a_crash_loses_ten_minutes_and_the_rest_has_the_same_bits(recipe: Make, home: Home) -> None:
    begun = begin(recipe("train.steps=9"), home, 300.0)
    whole, cut = begun.create_run(), begun.create_run()
    expected = train(begun.plan, whole)
    assert saved_steps(whole) == [6, 8, 9], "three are kept"

    def crash(report: StepReport) -> None:
        if report.step == 6:
            raise Crash

    with pytest.raises(Crash):
        train(begun.plan, cut, watch=crash)
    assert saved_steps(cut) == [2, 4, 6]
    done = train(begun.plan, cut)
    assert done.resumed_at == 6 and done.loss == expected.loss
    assert done.export is not None and expected.export is not None
    ours, theirs = ((folder / "model.safetensors").read_bytes() for folder in (done.export, expected.export))
    assert ours == theirs


def test_all_ranks_save_after_the_same_steps(recipe: Make, home: Home, ranks: Ranks) -> None:
    begun = begin(recipe("train.steps=5", "train.keep=0", "layout.dp=2", "layout.zero=3"), home, 300.0)
    run = begun.create_run()
    on_ranks(ranks, begun, run)
    assert saved_steps(run) == [2, 4, 5]


def test_an_interval_follows_the_run_s_own_failures() -> None:
    """√(2 · 2 s · 450 s) = 42.4 s: between the 10 s and the hour that it is kept within."""
    account = account_of([RunEvent(time=0.0, event="steps")])
    failed = replace(account, seconds={**account.seconds, "useful": 898.0, "saving": 2.0}, num_saves=1, num_failures=2)
    adapts = TrainJob(adapt_interval=True)
    assert SaveClock(adapts, 1.0, past=failed).interval_s == pytest.approx(42.43, abs=0.01)
    assert SaveClock(TrainJob(), 1.0, past=failed).interval_s == EVERY_S
    assert SaveClock(adapts, 1.0, past=replace(failed, num_failures=0)).interval_s == EVERY_S
    clock = SaveClock(adapts, 1.0, past=failed)
    clock.saved(8.0)  # four times as long: twice as far apart
    assert clock.interval_s == pytest.approx(84.85, abs=0.01)
    clock.committed(50.0)
    assert clock.interval_s == 100.0, "none waits for the one before"
