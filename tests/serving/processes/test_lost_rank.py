"""A server on two ranks loses one of them while requests run: every client is told, and the engine comes back."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.serving.tiny import run_server

BODY = {"model": "tiny", "prompt": "def main", "max_tokens": 1500, "temperature": 0, "ignore_eos": True}


_SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("layout", "rank"),
    [
        (("--tp", "2"), 1),
        pytest.param(("--tp", "2"), 0, marks=_SLOW),
        pytest.param(("--set", "serve.pp=2"), 0, marks=_SLOW),
        pytest.param(("--set", "serve.pp=2"), 1, marks=_SLOW),
    ],
)
def test_killing_a_rank_ends_no_client_in_silence(folder: Path, layout: tuple[str, str], rank: int) -> None:
    with run_server(folder, *layout, "--set", "serve.kv_bytes=20MB", "--set", "serve.dtype=fp32") as server:
        before = server.post("/v1/completions", BODY | {"max_tokens": 12})[1]["choices"][0]["text"]
        pids = server.engine_pids()
        assert len(pids) == 2
        said: list[tuple[int, Any]] = []
        clients = [threading.Thread(target=lambda: said.append(server.post("/v1/completions", BODY))) for _ in range(4)]
        for client in clients:
            client.start()
        server.until(lambda: server.metric("running") >= 1)
        os.kill(pids[rank], signal.SIGKILL)
        for client in clients:
            client.join(30)
        assert not any(client.is_alive() for client in clients) and len(said) == 4
        assert {status for status, _ in said} == {503}
        assert all("the engine failed" in found["error"]["message"] for _, found in said)
        server.until(lambda: server.metric("restarts_total") == 1 and server.is_ready(), 60)
        assert set(server.engine_pids()).isdisjoint(pids) and len(server.engine_pids()) == 2
        assert server.post("/v1/completions", BODY | {"max_tokens": 12})[1]["choices"][0]["text"] == before


@_SLOW
def test_devices_are_divided_by_the_planner(folder: Path) -> None:
    with run_server(folder, "--devices", "2", "--set", "serve.kv_bytes=20MB", "--set", "serve.dtype=fp32") as server:
        assert len(server.engine_pids()) == 2
        assert server.post("/v1/completions", BODY | {"max_tokens": 4})[0] == 200
