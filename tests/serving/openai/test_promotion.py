"""A server of registry:NAME@ALIAS serves what is promoted to the alias, and drops no request on the way."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from armillary.serving.openai.promotion import FollowedAlias, PromotionWatcher, followed_alias
from armillary.serving.openai.served_model import ServedModel
from armillary.spec.tables.serve import Serve
from armillary.store.home import Home
from armillary.store.registry.open_registry import open_registry
from armillary.store.registry.registry import Registry
from armillary.store.registry.release import Release
from armillary.store.resolve_model import resolve_model
from tests.serving.openai.test_app import api
from tests.serving.tiny import Server, make_folder, run_server
from tests.store.conftest import write_model


class Engine:
    """Starts and stops, or refuses to start."""

    def __init__(self, *, fails: bool = False) -> None:
        self.fails, self.stopped, self.retired = fails, False, False

    async def start(self) -> None:
        if self.fails:
            raise RuntimeError("no memory left")

    async def stop(self) -> None:
        self.stopped = True


def registry_of_two(home: Home, folder: Path) -> Registry:
    registry = open_registry(home)
    registry.push("tiny", folder, note="first")
    registry.push("tiny", folder, note="second")
    registry.promote("tiny:1", "champion")
    return registry


async def until(check: Any) -> None:
    async with asyncio.timeout(20):
        while not check():
            await asyncio.sleep(0.005)


def test_a_promotion_replaces_the_model_and_waits_for_its_last_request(tmp_path: Path) -> None:
    folder, said = write_model(tmp_path / "tiny"), list[str]()
    registry = registry_of_two(Home.at(tmp_path / "home"), folder)
    (folder / "tokenizer.json").unlink()
    made = api(folder)
    engines: dict[int, Any] = {1: Engine(), 2: Engine(fails=True)}
    made.served = replace(made.served, engine=engines[1])
    first = made.served

    def build(release: Release, folder: Path) -> ServedModel:
        assert (folder / "config.json").is_file()
        return replace(first, engine=engines[release.version])

    async def scenario() -> None:
        followed = FollowedAlias(
            registry=registry, reference="tiny@champion", release=registry.resolve("tiny:1"), poll_s=0.01
        )
        watcher = PromotionWatcher(made, followed, build, said.append)
        started = asyncio.create_task(asyncio.sleep(0))
        await started
        watcher.start(started)
        registry.promote("tiny:2", "champion")
        await until(lambda: any("tiny:2 cannot be served, tiny:1 stays: no memory left" in line for line in said))
        assert made.served is first and not first.engine.stopped
        registry.rollback("tiny", "champion")
        engines[2] = Engine()
        registry.push("tiny", folder, note="third")
        engines[3] = Engine()
        made._users[id(first)] = 1  # a request in flight
        registry.promote("tiny:3", "champion")
        await until(lambda: made.served is not first)
        assert made.served.engine is engines[3] and first.engine.retired
        await asyncio.sleep(0.05)
        assert not first.engine.stopped
        made._users[id(first)] = 0
        await until(lambda: first.engine.stopped)
        await watcher.stop()
        assert not engines[3].stopped

    asyncio.run(scenario())


def test_only_what_can_move_is_followed(tmp_path: Path) -> None:
    home = Home.at(tmp_path / "home")
    registry_of_two(home, write_model(tmp_path / "tiny"))

    def followed(text: str, **settings: float) -> FollowedAlias | None:
        return followed_alias(home, text, resolve_model(text, home, need_weights=True), Serve(**settings))  # type: ignore[arg-type]

    found = followed("registry:tiny@champion")
    assert found is not None and (found.release.text, found.poll_s) == ("tiny:1", 5.0)
    assert followed("registry:tiny") is not None
    assert followed("registry:tiny:2") is None
    assert followed("registry:tiny@champion", registry_poll_s=0) is None
    assert followed(str(tmp_path / "tiny")) is None


@pytest.mark.slow
def test_promotions_and_rollbacks_under_load_drop_none_of_10000_requests(tmp_path: Path) -> None:
    """Eight clients share 10,000 requests, half of them streams, while the alias moves to and fro all the time."""
    home = Home.at(tmp_path / "home")
    registry = registry_of_two(home, make_folder(tmp_path))
    outcomes, numbers, moves = list[str](), iter(range(10_000)), 0
    flags = ("--home", str(home.work), "--set", "serve.kv_bytes=20MB", "--set", "serve.registry_poll_s=0.2")
    with run_server(tmp_path / "x", *flags, model="registry:tiny@champion") as server:

        def client() -> None:
            for number in numbers:
                outcomes.append(one_request(server, stream=number % 2 == 1))

        threads = [threading.Thread(target=client) for _ in range(8)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            text = "tiny:1" if moves % 2 else "tiny:2"
            registry.rollback("tiny", "champion") if moves % 2 else registry.promote("tiny:2", "champion")
            moves += 1
            server.until(lambda text=text, moves=moves: served_last(server) == (text, moves), 90)  # type: ignore[misc]
        for thread in threads:
            thread.join()
        server.until(lambda: len(server.engine_pids()) == 1)
    print(f"{moves} moves of the alias")
    assert Counter(outcomes) == {"complete": 10_000} and moves >= 4


def one_request(server: Server, *, stream: bool) -> str:
    """ "complete", or what went wrong."""
    body = {"model": "tiny", "prompt": "x", "max_tokens": 4, "ignore_eos": True, "stream": stream}
    try:
        status, text, _ = server.call("POST", "/v1/completions", json.dumps(body).encode())
    except OSError as error:
        return repr(error)
    whole = text.endswith("data: [DONE]\n\n") and "error" not in text if stream else '"completion_tokens":4' in text
    return "complete" if status == 200 and whole else f"{status}: {text[-200:]}"


def served_last(server: Server) -> tuple[str, int]:
    """The release that the server says it serves now, and how often that has changed."""
    lines = [line for line in server.log.read_text().splitlines() if line.startswith("serving tiny:")]
    return (lines[-1].removeprefix("serving ") if lines else "", len(lines))
