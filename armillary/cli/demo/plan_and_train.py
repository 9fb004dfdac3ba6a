"""Stages 2 and 3 of the demo: plan the run, train it on its ranks, interrupt it once, and resume it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from armillary.cli.demo.state import RECIPE, DemoState
from armillary.cli.output import Output
from armillary.cli.train.planning import begin
from armillary.cli.train.train import run_training
from armillary.errors import ArmillaryError
from armillary.spec.recipe import load_recipe
from armillary.store.gauges import last_record, read_gauges
from armillary.store.runs import Run, find_run, list_runs, new_name
from armillary.units import seconds_text

if TYPE_CHECKING:
    from armillary.training.prepare_run import ResolvedRun

STOP_AT = 0.4
"""share of the steps after which the run is interrupted"""
_POLL_S = 0.1


def plan(state: DemoState) -> ResolvedRun:
    """What the training run will take, before anything is started."""
    with state.stage("plan", "what the recipe will take, before anything runs") as say:
        begun = begin(state.out, state.home, state.recipe)
        say(f"{seconds_text(begun.plan.predicted['step_s'])} per step predicted")
        state.update(title=f"{begun.plan.model.name} on {begun.plan.cluster.text()}")
        return begun


def train(state: DemoState, begun: ResolvedRun) -> Run:
    """Train, be interrupted by a real SIGINT, and resume from the checkpoint that was saved."""
    job, layout = begun.recipe.train, begun.plan.layout
    ranks = f"{layout.num_devices} ranks" if layout.num_devices > 1 else "one process"
    with state.stage("train", f"{job.steps:,} steps on {ranks}, interrupted once on the way") as say:
        before = begun.unfinished()
        name = before.name if before else new_name({run.name for run in list_runs(state.home)})
        try:
            outcome = _train_and_resume(state, begun, name, stop=max(1, round(STOP_AT * job.steps)))
        finally:  # also of an interrupted run, every step so far
            run = _run(state, name)
            if run is not None and run.gauges.is_file():
                state.update(records=tuple(read_gauges(run.gauges)))
        say(_outcome_text(outcome, state.report.stops))
        return find_run(state.home, name)


def _train_and_resume(state: DemoState, begun: ResolvedRun, name: str, *, stop: int) -> dict[str, Any]:
    """How the run called `name` ended, interrupted after about `stop` steps on the way."""
    settings: dict[str, Any] = {"text": RECIPE.read_text(), "overrides": state.overrides, "name": name, "brief": True}
    with interrupted_at(state, name, stop) as sent:
        outcome = run_training(state.out, begun, **settings)
    if not outcome["finished"] and sent.is_set():
        state.update(stops=(int(outcome["steps"]),))
        outcome = run_training(state.out, begun, **settings)
    if not outcome["finished"]:
        raise KeyboardInterrupt  # by somebody else
    return outcome


def _outcome_text(outcome: dict[str, Any], stops: tuple[int, ...]) -> str:
    val = outcome["val_loss"]
    loss = f"held-out loss {val:.3f}" if val is not None else f"loss {outcome['loss']:.3f}"
    stopped = f", interrupted after {stops[0]:,} and resumed" if stops else ""
    return f"{outcome['steps']:,} steps{stopped}, {loss}, exported as a Hugging Face folder"


@contextmanager
def interrupted_at(state: DemoState, name: str, step: int) -> Iterator[threading.Event]:
    """Ctrl-C by the demo itself: SIGINT for this process once the run called `name` has done `step` steps, unless it
    was already past them; the event is set when it is sent."""
    sent, over = threading.Event(), threading.Event()
    run = _run(state, name)
    if run is not None and run.state.step >= step:
        yield sent
        return

    def watch() -> None:
        while not over.wait(_POLL_S):
            if _steps_done(_run(state, name)) >= step:
                sent.set()
                state.out.say(f"… Ctrl-C after step {step} (the demo presses it)")
                os.kill(os.getpid(), signal.SIGINT)
                return

    thread = threading.Thread(target=watch, name="interruption", daemon=True)
    thread.start()
    try:
        yield sent
    finally:
        over.set()
        thread.join()


def _run(state: DemoState, name: str) -> Run | None:
    with suppress(ArmillaryError):
        return find_run(state.home, name)
    return None


def _steps_done(run: Run | None) -> int:
    last = last_record(run.gauges) if run is not None else None
    return int(last.get("step", -1)) + 1 if last else 0


def train_changed(state: DemoState, recipe: Path, steps: int) -> Run:
    """The run with a lever applied, only as long as it takes to time it."""
    overrides = (f"train.steps={steps}",)
    begun = begin(Output("silent"), state.home, load_recipe(recipe, overrides))
    name = new_name({run.name for run in list_runs(state.home)})
    outcome = run_training(state.out, begun, text=recipe.read_text(), overrides=overrides, name=name, brief=True)
    if not outcome["finished"]:
        raise KeyboardInterrupt
    return find_run(state.home, name)
