"""/health over an engine whose processes are made up: dead with no restart under way is 503, anything else is 200."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from armillary.serving.openai.app import Api
from armillary.serving.processes import engine_client as engine_process
from armillary.serving.processes.engine_ipc import EngineConfig, EngineReady
from armillary.serving.processes.worker_process import frame
from tests.serving.openai.test_app import api, ask

STARTED = EngineReady(max_model_len=300, kv_tokens=1000, kv_text="", phases=[("in all", 1.0)])


class Mortal:
    """Processes of an engine that starts as long as `starts` says so, and ends when `die` is called."""

    count, alive = 1, True

    def __init__(self, starts: Callable[[], bool]) -> None:
        self._starts = starts
        self._reader: asyncio.StreamReader | None = None

    async def start(self, config: EngineConfig) -> asyncio.StreamReader:
        if not self._starts():
            raise OSError(12, "Cannot allocate memory")
        self._reader = asyncio.StreamReader()
        self._reader.feed_data(frame(STARTED))
        return self._reader

    def die(self) -> None:
        assert self._reader is not None
        self._reader.feed_eof()

    def lost_one(self) -> bool:
        return False

    def kill(self) -> None:
        self.die()

    async def end(self) -> int:
        return 1


async def health(made: Api) -> tuple[int, Any]:
    status, body, _ = await ask(made, "GET", "/health")
    return status, body


async def until_health(made: Api, status: int) -> Any:
    async with asyncio.timeout(20):
        while (found := await health(made))[0] != status:
            await asyncio.sleep(0.001)
    return found[1]


def test_an_engine_that_is_dead_and_stays_dead_is_503_until_it_is_back(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_process, "_BACKOFF_S", (0.0, 0.0, 0.0, 0.05))
    made, starts = api(folder), [True]
    engine, ranks = made.served.engine, Mortal(lambda: starts[0])
    engine._ranks = ranks  # type: ignore[assignment]

    async def scenario() -> None:
        await engine.start()
        assert (await health(made))[0] == 200
        starts[0] = False
        ranks.die()
        answer = await until_health(made, 503)
        assert answer["status"] == "down" and "failed to restart" in answer["reason"]
        assert (await ask(made, "GET", "/ready"))[0] == 503
        starts[0] = True
        await until_health(made, 200)
        async with asyncio.timeout(20):
            while (await ask(made, "GET", "/ready"))[0] != 200:
                await asyncio.sleep(0.001)
        await engine.stop()
        assert (await health(made))[0] == 503

    asyncio.run(scenario())


def test_a_restart_under_way_is_no_reason_to_end_the_server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An orchestrator that restarts by /health would only make it longer."""
    made = api(folder)
    engine, ranks = made.served.engine, Mortal(lambda: True)
    engine._ranks = ranks  # type: ignore[assignment]
    monkeypatch.setattr(engine_process, "_BACKOFF_S", (60.0,))

    async def scenario() -> None:
        await engine.start()
        ranks.die()
        async with asyncio.timeout(20):
            while engine.state != "restarting":
                await asyncio.sleep(0.001)
        assert (await health(made))[0] == 200 and (await ask(made, "GET", "/ready"))[0] == 503
        await engine.stop()

    asyncio.run(scenario())


def test_a_server_that_no_longer_looks_after_its_engine_says_so(folder: Path) -> None:
    """A bug in what starts engines must not look like health."""
    made = api(folder)
    engine, ranks = made.served.engine, Mortal(lambda: True)
    engine._ranks = ranks  # type: ignore[assignment]

    async def scenario() -> None:
        await engine.start()

        async def broken() -> int:
            raise RuntimeError("a bug")

        ranks.end = broken  # type: ignore[method-assign]
        ranks.die()
        assert "not restarted" in (await until_health(made, 503))["reason"]

    asyncio.run(scenario())
