"""SIGTERM with a grace period that is shorter than the step: saved in time, at any point, and resumed bit-equal."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from armillary.parallel.consensus import Consensus
from armillary.spec.plan import Plan
from armillary.spec.recipe import Recipe
from armillary.store.hang_verdict import HangVerdict, read_verdict, write_verdict
from armillary.store.home import Home
from armillary.store.runs import Run
from armillary.training.checkpoint import saver
from armillary.training.checkpoint.staging import StagingBuffer
from armillary.training.loop import train
from armillary.training.prepare_run import model_source, resolve_run
from armillary.training.resilience import sigterm_grace
from armillary.training.resilience.rank_heartbeat import Heartbeat, HeartbeatBoard
from armillary.training.resilience.sigterm_grace import Preemption, StepAbandoned, UpdateGate
from armillary.training.run_lifecycle import Trained
from armillary.training.trainer import Trainer
from tests.chaos import weights_digest
from tests.ranks import Ranks
from tests.training.checkpoint.test_checkpoint import Make, losses

STEP_S = 30.0
SETTINGS = ("layout.dp=2", "train.steps=6", "train.eval_every=0")


def test_a_gate_holds_the_update_back_and_lets_a_begun_one_through() -> None:
    gate = UpdateGate()
    assert gate.close() is None, "between two steps"
    gate.start_step(3)
    assert gate.close() == 3
    gate.open()
    gate.before_update()
    assert gate.close() is None, "its update has begun"
    gate.end_step()
    gate.start_step(4)
    assert gate.close() == 4
    gate.abandon()
    with pytest.raises(StepAbandoned):
        gate.before_update()


def test_a_save_that_fails_in_any_way_lets_the_step_go_on() -> None:
    gate, said = UpdateGate(), list[str]()

    def save(step: int, random: object) -> None:
        raise ValueError("a bug")

    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with Preemption(Consensus(rank=0, size=1), gate, grace_s=0.3, save=save, say=said.append) as preemption:
            gate.start_step(3)
            os.kill(os.getpid(), signal.SIGTERM)
            assert preemption._answered.wait(60)
            update = threading.Thread(target=gate.before_update, daemon=True)
            update.start()
            update.join(60)
            assert not update.is_alive() and not preemption.was_abandoned()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert said == ["the step could not be abandoned (ValueError('a bug')); the run stops after it"]


def test_sigterm_during_a_long_validation(recipe: Make, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the steps before it made is saved by the run's own saver; the process says that it leaves, and leaves."""
    made = recipe("train.steps=4", "train.eval_every=2", "train.save_every=1", "train.grace_s=60")
    begun = resolve_run(made, home, model_source(made, home))
    begun.prepare()
    run, whole = begun.create_run(), begun.create_run()
    write_verdict(run.folder, HangVerdict(cause="slow_rank", rank=0, text="an earlier start stood still"))
    beats: list[Heartbeat] = []
    outcomes: list[Trained] = []
    last_words: list[bool] = []
    buffers: list[object] = []
    left = threading.Event()

    def leave(code: int) -> None:
        last_words.append(beats[-1].ended)
        left.set()

    def validate(trainer: Trainer) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        assert left.wait(60), "validation takes longer than the grace period"

    def make_buffer(*args: Any, **more: Any) -> StagingBuffer:
        buffers.append(args)
        return StagingBuffer(*args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(sigterm_grace, "COMPLETE_SHARE", 0.0)
        patch.setattr(sigterm_grace, "UNWIND_S", 0.0)
        patch.setattr(os, "_exit", leave)
        patch.setattr(HeartbeatBoard, "write", lambda self, beat: beats.append(beat))
        patch.setattr(Trainer, "validate", validate)
        patch.setattr(saver, "StagingBuffer", make_buffer)
        done = train(begun.plan, run, leaving=outcomes.append)
    assert (done.steps, done.saved, done.finished, run.state.state) == (2, 2, False, "interrupted")
    assert run.checkpoint_steps() == [1, 2] and [each.steps for each in outcomes] == [2] and last_words == [True]
    assert len(buffers) == 1, "a second one would need as much memory again"
    verdict = read_verdict(run.folder)
    assert verdict is not None and verdict.resolved
    assert train(begun.plan, run).loss == train(begun.plan, whole).loss and losses(run) == losses(whole)


def train_rank(plan: str, folder: str) -> tuple[int, int]:
    done = train(Plan.from_json(plan), Run(folder=Path(folder)))
    return done.resumed_at, done.steps


def start(run: Run, point: str, seconds: float) -> list[subprocess.Popen[str]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared = {**os.environ, **world, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    line = [sys.executable, "-m", "tests.training.slow_step_rank", str(run.folder), point, str(seconds)]
    return [
        subprocess.Popen(
            line,
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]


@pytest.mark.parametrize(
    ("point", "seconds", "complete", "grace_s"),
    [
        pytest.param("backward", STEP_S, 2, 3.0, marks=pytest.mark.slow),
        pytest.param("data", STEP_S, 2, 10.0, marks=pytest.mark.slow),
        pytest.param("forward", STEP_S, 2, 10.0, marks=pytest.mark.slow),
        pytest.param("backward", STEP_S, 2, 10.0, marks=pytest.mark.slow),
        pytest.param("gradients", STEP_S, 2, 10.0, marks=pytest.mark.slow),
        pytest.param("update", 4.0, 3, 10.0, marks=pytest.mark.slow),
    ],
)
def test_sigterm_in_the_middle_of_a_long_step(
    point: str, seconds: float, complete: int, grace_s: float, recipe: Callable[..., Recipe], home: Home, ranks: Ranks
) -> None:
    """Rank 1 is signalled, rank 0 learns of it; both are slow."""
    made = recipe(*SETTINGS, f"train.grace_s={grace_s}")
    begun = resolve_run(made, home, model_source(made, home), cpu_ranks=2)
    begun.prepare()
    run, plan = begun.create_run(name="stopped"), begun.plan.to_json()
    started = start(run, point, seconds)
    try:
        end = time.monotonic() + 90
        marks = [run.folder / f"slow-{rank}" for rank in range(2)]
        while not all(path.exists() for path in marks) and time.monotonic() < end and started[0].poll() is None:
            time.sleep(0.05)
        os.kill(started[1].pid, signal.SIGTERM)
        began = time.monotonic()
        said = [rank.communicate(timeout=60)[0] for rank in started]
        took = time.monotonic() - began
    finally:
        for rank in started:
            rank.kill()
    assert [rank.returncode for rank in started] == [0, 0], said
    assert took < (grace_s if grace_s == 10.0 else STEP_S / 2), "the shorter one is not judged: the machine may be busy"
    assert (run.state.state, run.state.step, run.checkpoint_steps()) == ("interrupted", complete, [complete])
    assert ranks.run(2, train_rank, plan, str(run.folder)) == [(complete, 6)] * 2
    ranks.run(2, train_rank, plan, str(begun.create_run(name="whole").folder))
    assert weights_digest(home, "stopped") == weights_digest(home, "whole")
