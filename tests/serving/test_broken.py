"""An engine that cannot come back: the server stays, says so, and takes it up again when it can."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from tests.serving.tiny import make_folder, run_server

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")]


def test_a_server_outlives_a_model_that_is_gone(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    with run_server(folder) as server:
        shutil.move(folder / "model.safetensors", tmp_path / "away")
        os.kill(server.engine_pids()[0], signal.SIGKILL)
        server.until(lambda: server.log.read_text().count("restarting it") >= 2, 60)
        status, answer = server.post("/v1/completions", {"prompt": "def"})
        assert status == 503 and answer["error"]["code"] == "engine_unavailable"
        assert server.get("/health")[0] == 200 and server.get("/ready")[0] == 503
        shutil.move(tmp_path / "away", folder / "model.safetensors")
        server.until(server.is_ready, 90)
        assert server.post("/v1/completions", {"prompt": "def", "max_tokens": 2})[0] == 200


def test_an_engine_ends_with_its_server_however_that_ends(tmp_path: Path) -> None:
    with run_server(make_folder(tmp_path)) as server:
        (engine,) = server.engine_pids()
        server.process.kill()
        server.process.wait(10)
        for _ in range(200):
            if not Path(f"/proc/{engine}/cmdline").exists() or not Path(f"/proc/{engine}/cmdline").read_bytes():
                return
            signal.sigtimedwait([], 0.05)
        raise AssertionError("the engine is still there")
