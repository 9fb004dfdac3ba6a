"""What goes wrong out of sight: a process that cannot be started, a message with a bug in it, too long a list."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from armillary.engine.request.sampling_params import SamplingParams
from armillary.errors import BadInput, ContextLengthExceeded
from armillary.serving.http.problem import Problem
from armillary.serving.http.server import ignore_broken_pipe
from armillary.serving.openai.completions import complete
from armillary.serving.openai.schemas import CompletionRequest
from armillary.serving.processes import engine_client as engine_process
from armillary.serving.processes.engine_client import EngineClient
from armillary.serving.processes.engine_ipc import EngineConfig, EngineReady, Failed, Refused, StepOutput
from armillary.serving.processes.request_mailbox import Mailbox
from armillary.serving.processes.server_metrics import Metrics
from armillary.serving.processes.worker_process import frame
from armillary.spec.tables.serve import Serve
from armillary.store.home import Home

STARTED = EngineReady(max_model_len=8, kv_tokens=8, kv_text="", phases=[("in all", 0.1)])


class FewProcesses:
    """Stands in for the engine's processes: the first is lost, the second cannot be started, the third stays."""

    alive, count = True, 1

    def __init__(self) -> None:
        self.starts = 0

    def send(self, message: Any) -> None:
        pass

    async def start(self, config: EngineConfig) -> asyncio.StreamReader:
        self.starts += 1
        if self.starts == 2:
            raise OSError(12, "Cannot allocate memory")
        reader = asyncio.StreamReader()
        reader.feed_data(frame(STARTED))
        if self.starts == 1:
            reader.feed_eof()
        return reader

    def lost_one(self) -> bool:
        return False

    async def end(self) -> int:
        return -9


def engine_of(tmp_path: Path, say: Callable[[str], None]) -> EngineClient:
    config = EngineConfig(model="m", serve=Serve(), home=Home(work=tmp_path, cache=tmp_path))
    return EngineClient(config, ranks=1, metrics=Metrics(), say=say)


def test_an_engine_that_cannot_be_started_again_at_once_is_started_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_process, "_BACKOFF_S", (0.0,))
    said: list[str] = []

    async def live() -> tuple[int, str]:
        engine = engine_of(tmp_path, said.append)
        ranks = FewProcesses()
        engine._ranks = ranks  # type: ignore[assignment]
        await engine.start()
        async with asyncio.timeout(20):
            while ranks.starts < 3 or engine.state != "ready":
                await asyncio.sleep(0.01)
        found = ranks.starts, engine.state
        await engine.stop()
        return found

    assert asyncio.run(live()) == (3, "ready")
    assert any("Cannot allocate memory" in line for line in said)


class Steady(FewProcesses):
    """Processes that can always be started; `reader` is where the last one is heard."""

    async def start(self, config: EngineConfig) -> asyncio.StreamReader:
        self.starts += 1
        self.reader = asyncio.StreamReader()
        self.reader.feed_data(frame(STARTED))
        return self.reader


def test_a_message_that_cannot_be_understood_fails_what_waits_and_the_engine_begins_anew(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []

    async def live() -> int:
        engine, ranks, box = engine_of(tmp_path, said.append), Steady(), Mailbox(1, eager=True)
        engine._ranks = ranks  # type: ignore[assignment]
        await engine.start()
        engine.submit([1, 2], SamplingParams(), box, 0)
        ranks.reader.feed_data(frame(StepOutput(keys=[1 << 10], tokens=[])))  # a key without its token: a bug
        async with asyncio.timeout(20):
            with pytest.raises(Problem, match="the engine failed"):
                await box.take()
            while ranks.starts < 2 or engine.state != "ready":
                await asyncio.sleep(0.01)
        await engine.stop()
        return ranks.starts

    assert asyncio.run(live()) == 2
    assert any("report this" in line for line in said) and "Traceback" in capfd.readouterr().err


class Unlucky(Steady):
    """Two ranks: the port at which they were to meet is taken, as often as `times` says."""

    count = 2

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    async def start(self, config: EngineConfig) -> asyncio.StreamReader:
        reader = await super().start(config)
        if self.starts <= self.times:
            reader = asyncio.StreamReader()
            reader.feed_data(frame(Failed(message="DistNetworkError: address in use", by_user=False)))
            reader.feed_eof()
        return reader


@pytest.mark.parametrize("times", [1, 2])
def test_ranks_that_cannot_meet_are_started_once_more(tmp_path: Path, times: int) -> None:
    async def live() -> int:
        engine, ranks = engine_of(tmp_path, lambda text: None), Unlucky(times)
        engine._ranks = ranks  # type: ignore[assignment]
        try:
            await asyncio.wait_for(engine.start(), 20)
        finally:
            await engine.stop()
        return ranks.starts

    if times == 1:
        assert asyncio.run(live()) == 2
    else:
        with pytest.raises(BadInput, match="ended while loading"):
            asyncio.run(live())


def test_a_refusal_says_whether_to_ask_again(tmp_path: Path) -> None:
    async def refused(**more: Any) -> Problem:
        engine, ranks, box = engine_of(tmp_path, lambda text: None), Steady(), Mailbox(1, eager=True)
        engine._ranks = ranks  # type: ignore[assignment]
        await engine.start()
        number = engine.submit([1, 2], SamplingParams(), box, 0)
        ranks.reader.feed_data(frame(Refused(number=number, message="no; later", **more)))
        with pytest.raises(Problem) as found:
            await asyncio.wait_for(box.take(), 20)
        await engine.stop()
        return found.value

    later, never = asyncio.run(refused(overloaded=True)), asyncio.run(refused(code=ContextLengthExceeded.code))
    assert (later.status, later.retry_after_s) == (429, 5) and (never.status, never.retry_after_s) == (400, None)
    assert never.code == "context_length_exceeded"


def test_a_line_that_nobody_reads_is_lost_and_nothing_else() -> None:
    said: list[str] = []

    def into_a_closed_pipe(text: str) -> None:
        said.append(text)
        raise BrokenPipeError

    ignore_broken_pipe(into_a_closed_pipe)("the engine ended")
    assert said == ["the engine ended"]


def test_a_list_of_too_many_prompts_is_refused_unread() -> None:
    async def encode(*words: Any, **more: Any) -> list[int]:
        raise AssertionError("it was read")

    served: Any = SimpleNamespace(tokenization=SimpleNamespace(encode=encode), max_model_len=8)
    with pytest.raises(Problem, match="more than 1,024 completions"):
        asyncio.run(complete(served, CompletionRequest(prompt=["a"] * 1025), 0.0))
