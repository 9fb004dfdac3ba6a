"""Slow engines are left alone, stopped and stuck ones are ended: by a made-up clock, and with processes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from armillary.engine.engine_thread import EngineThread
from armillary.engine.request.sampling_params import SamplingParams
from armillary.serving.http.problem import Problem
from armillary.serving.processes.engine_client import EngineClient
from armillary.serving.processes.engine_ipc import EngineConfig, HeartbeatMessage, StepOutput
from armillary.serving.processes.heartbeat import Heartbeat
from armillary.serving.processes.liveness import Liveness
from armillary.serving.processes.rank_processes import Ranks
from armillary.serving.processes.request_mailbox import Mailbox
from armillary.serving.processes.server_metrics import Metrics
from armillary.spec.tables.serve import Serve
from armillary.store.home import Home
from tests.engine.test_engine import make_engine
from tests.fork_server import ForkServer
from tests.serving.slow_engine import QUICK, SLOW, STUCK


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def watched(hung_s: float | None = 120.0) -> tuple[Liveness, Clock]:
    clock = Clock()
    return Liveness(frozen_s=5.0, hung_s=hung_s, clock=clock), clock


def beats(liveness: Liveness, clock: Clock, seconds: float, expected_s: float | None, *, moves: bool = False) -> float:
    """A step that takes `seconds`; after how many it was to be ended, or 0."""
    for half in range(int(2 * seconds) + 1):
        clock.now += 0.5
        age = half / 2
        liveness.heard(HeartbeatMessage(step_s=age, still_s=0.5 if moves else age, tokens=2048, expected_s=expected_s))
        if liveness.hung():
            return age
    return 0.0


@pytest.mark.parametrize("expected_s, seconds", [(600.0, 900.0), (40.0, 130.0), (30.0, 500.0)])
def test_a_step_that_was_expected_to_be_slow_is_left_alone_and_ready(expected_s: float, seconds: float) -> None:
    liveness, clock = watched()
    assert not beats(liveness, clock, seconds, expected_s)
    if seconds < 4 * expected_s:
        assert liveness.slow() is None


def test_a_step_far_beyond_what_is_expected_is_ended() -> None:
    """A GPU that hangs: steps of 10 ms do not end. As before, after hung_s."""
    liveness, clock = watched()
    assert 120.0 <= beats(liveness, clock, 1000.0, 0.01) <= 121.0
    assert "2,048 tokens has run for 120 s, expected to take 0.01 s" in (liveness.hung() or "")
    liveness, clock = watched()
    assert 600.0 <= beats(liveness, clock, 1000.0, 30.0) <= 601.0


def test_a_step_whose_thread_moves_on_is_given_longer_but_not_for_ever() -> None:
    """A kernel that is compiled for the first time."""
    liveness, clock = watched()
    assert not beats(liveness, clock, 1100.0, 0.01, moves=True)
    liveness, clock = watched()
    assert 1200.0 <= beats(liveness, clock, 5000.0, 0.01, moves=True) <= 1201.0


def test_before_any_step_was_measured_the_first_has_twenty_minutes() -> None:
    liveness, clock = watched()
    assert 1200.0 <= beats(liveness, clock, 5000.0, None) <= 1201.0


def test_nobody_is_ended_where_that_was_not_asked_for() -> None:
    liveness, clock = watched(hung_s=None)
    assert not beats(liveness, clock, 5000.0, 0.01)
    clock.now += 5000.0
    assert liveness.hung() is None and "silent for 5000 s" in (liveness.slow() or "")


def test_a_silent_process_is_not_ready_and_then_ended_whatever_it_said_before() -> None:
    liveness, clock = watched()
    liveness.heard(HeartbeatMessage(step_s=3.0, still_s=3.0, tokens=1, expected_s=1000.0))
    clock.now += 6.0
    assert "silent for 6 s" in (liveness.slow() or "") and liveness.hung() is None
    clock.now += 115.0
    assert "silent for 121 s" in (liveness.hung() or "")
    liveness.heard(StepOutput())
    assert liveness.slow() is None and liveness.hung() is None


def test_a_server_that_was_stopped_itself_does_not_blame_the_engine() -> None:
    liveness, clock = watched()
    clock.now += 3600.0
    liveness.excuse(3599.0)
    assert liveness.hung() is None and liveness.clock() - liveness.heard_at == pytest.approx(1.0)


def test_beats_count_no_time_in_which_the_process_was_stopped() -> None:
    clock, sent = Clock(), list[HeartbeatMessage]()
    engine = make_engine(overlap=False)
    engine.loop.clock = clock
    worker = EngineThread(engine)
    heartbeat = Heartbeat(worker, sent.append, interval_s=0.5)
    for _ in range(8):
        clock.now += 0.5
        heartbeat.beat(0.5)
    assert len(sent) == 6 and sent[-1].step_s == sent[-1].still_s == 4.0
    clock.now += 3600.0  # the machine slept
    heartbeat.beat(3600.0)
    assert sent[-1].step_s == 5.0
    worker._last_iteration = clock.now
    clock.now += 0.25
    heartbeat.beat(0.25)
    assert len(sent) == 7, "an iteration that has just begun needs no heartbeat"


@pytest.mark.skipif(sys.platform == "win32", reason="stops a process by a signal")
def test_a_slow_process_answers_and_a_stuck_and_a_stopped_one_are_ended(
    tmp_path: Path, fork_server: ForkServer
) -> None:
    """hung_s is shorter than the slow step takes: nobody is killed for being slow."""
    code = f"from {__name__} import slow_stuck_and_stopped; slow_stuck_and_stopped({str(tmp_path)!r})"
    done = fork_server.start([], tmp_path / "log", program=("-c", code))
    assert done.wait(200) == 0, done.err


def slow_stuck_and_stopped(tmp_path: str) -> None:
    """In a process whose engines are forks of it."""
    said: list[str] = []
    config = EngineConfig(model="", serve=Serve(frozen_s=2.5, hung_s=3.5), home=Home.at(Path(tmp_path)))
    engine = EngineClient(config, ranks=1, metrics=Metrics(), say=said.append)
    engine._ranks = Ranks(1, replace(engine.config, program="tests.serving.slow_engine"), print)

    async def ask(prompt: list[int]) -> Mailbox:
        box = Mailbox(1, eager=False)
        engine.submit(prompt, SamplingParams(max_tokens=1), box, 0)
        return box

    async def restarted(times: int) -> None:
        async with asyncio.timeout(60):
            while engine.metrics.restarts < times or engine.state != "ready":
                await asyncio.sleep(0.02)

    async def scenario() -> None:
        await engine.start()
        box, troubles = await ask([SLOW] + [9] * 7), set()
        async with asyncio.timeout(60):
            waiting = asyncio.create_task(box.take())
            while not waiting.done():
                troubles.add(engine.why_not_ready())
                await asyncio.sleep(0.1)
        assert engine.metrics.restarts == 0 and troubles == {None} and not said, said

        box = await ask([STUCK])
        await restarted(1)
        assert "a step of 1 tokens has run for" in said[0], said
        with pytest.raises(Problem, match="the engine failed"):
            await box.take()
        assert (await (await ask([QUICK])).take())[0].token is not None

        os.kill(engine._ranks._processes[0].pid, signal.SIGSTOP)
        await restarted(2)
        assert any("silent for" in line for line in said), said
        assert (await (await ask([QUICK])).take())[0].token is not None
        await engine.stop()

    asyncio.run(scenario())
