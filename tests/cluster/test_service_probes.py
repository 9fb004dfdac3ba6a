"""The rendered probes against a real server process through its life: it loads, serves, loses its engine, drains, and
cannot be helped any more."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from armillary.cli.up import up
from tests.cluster.kubelet import Kubelet
from tests.fork_server import shared
from tests.serving.tiny import Server, make_folder

SPEED = 4.0
"""failures add up four times faster than the manifest says"""


def container_of(model: Path, folder: Path) -> dict[str, Any]:
    """The container that `armillary up --to kubernetes` renders for this model."""
    file, recipe = folder / "bot.yaml", folder / "service.toml"
    recipe.write_text(f'[model]\npath = "{model}"\n[serve]\nname = "bot"\nkv_bytes = 20_000_000\ndrain_s = 20.0\n')
    words = ["--to", "kubernetes", "--out", str(file), "--set", "launch.image=example.org/a:1"]
    result = CliRunner().invoke(up, [str(recipe), *words])
    assert result.exit_code == 0, result.output
    objects = list(yaml.safe_load_all(file.read_text()))
    (folder / "replica.toml").write_text(objects[0]["data"]["replica.toml"])
    replica = next(each for each in objects if each["metadata"]["name"] == "bot-replica" and "template" in each["spec"])
    (container,) = replica["spec"]["template"]["spec"]["containers"]
    return dict(container)


@contextmanager
def pod(tmp_path: Path) -> Iterator[tuple[Server, Kubelet, Path]]:
    """The container's own arguments, but for where its files and its port are here; and its kubelet."""
    model = make_folder(tmp_path / "bot")
    container = container_of(model, tmp_path)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    there = {"0.0.0.0": "127.0.0.1", "8000": str(port), "/etc/armillary/replica.toml": str(tmp_path / "replica.toml")}
    words = [there.get(word, word) for word in container["args"]]
    log = tmp_path / "server.log"
    process = shared().start([*words, "--home", str(tmp_path / "home")], log, cwd=tmp_path, err_to_out=True)
    server = Server(f"http://127.0.0.1:{port}", process, log.with_suffix(".out"))
    try:
        with Kubelet(container, {"http": port}, speed=SPEED) as kubelet:
            yield server, kubelet, model
    finally:
        process.kill()
        process.wait(30)


def stream(server: Server, tokens: int, ended: list[int]) -> threading.Thread:
    """A request that lasts, in a thread of its own."""

    def ask() -> None:
        ended.append(server.post("/v1/completions", {"model": "bot", "prompt": "def", "max_tokens": tokens})[0])

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    return thread


@pytest.mark.slow
def test_it_loads_serves_restarts_its_engine_and_drains(tmp_path: Path) -> None:
    with pod(tmp_path) as (server, kubelet, _):
        started = kubelet.wait_for("started", 90)
        assert kubelet["startup"].statuses[0] != 200  # it failed until the model was loaded
        kubelet.wait_for("ready", 20)
        assert server.post("/v1/completions", {"model": "bot", "prompt": "def", "max_tokens": 4})[0] == 200

        (engine,) = server.engine_pids()  # an engine that dies is restarted: not ready meanwhile, and not killed
        os.kill(engine, signal.SIGKILL)
        server.until(lambda: not server.is_ready(), 10)
        server.until(server.is_ready, 60)
        server.until(lambda: kubelet.ready, 20)

        ended: list[int] = []
        asked = stream(server, 250, ended)
        time.sleep(0.2)
        server.process.terminate()  # what preStop's sleep is followed by
        begin, code = time.monotonic(), None
        while code is None and time.monotonic() - begin < 60:
            code = server.process.poll()
            time.sleep(0.05)
        asked.join(30)
        assert ended == [200] and code == 0  # the request was finished, and the server ended by itself
        assert set(kubelet["liveness"].statuses) <= {200, 0}, kubelet["liveness"].statuses
        assert "kill" not in kubelet.names, kubelet.events
        print(f"started after {started:.1f} s; {kubelet.events}; statuses {kubelet['liveness'].statuses}")


@pytest.mark.slow
def test_a_draining_server_is_alive_and_not_ready(tmp_path: Path) -> None:
    """Its request hangs for some seconds, and is answered. While it drains it takes no connections: the manifest's
    liveness probe has to fail for longer than serve.drain_s before it kills, and the kubelet asks no pod that ends."""
    with pod(tmp_path) as (server, kubelet, _):
        kubelet.wait_for("ready", 90)
        (engine,) = server.engine_pids()
        ended: list[int] = []
        asked = stream(server, 250, ended)
        time.sleep(0.1)
        os.kill(engine, signal.SIGSTOP)  # the request hangs
        server.process.terminate()
        kubelet.wait_for("not ready", 15)
        time.sleep(4)
        assert kubelet["readiness"].statuses[-1] in (0, 503)  # 0: it takes no connections any more
        assert "kill" not in kubelet.names, kubelet["liveness"].statuses
        os.kill(engine, signal.SIGCONT)
        asked.join(60)
        assert server.process.wait(60) == 0


@pytest.mark.slow
def test_a_server_that_cannot_be_helped_is_killed(tmp_path: Path) -> None:
    """Its model's files are gone, so that its engine cannot be restarted."""
    with pod(tmp_path) as (server, kubelet, model):
        kubelet.wait_for("ready", 90)
        shutil.rmtree(model)
        (engine,) = server.engine_pids()
        os.kill(engine, signal.SIGKILL)
        kubelet.wait_for("not ready", 30)
        killed = kubelet.wait_for("kill", 120)
        assert kubelet["liveness"].statuses[-6:] == [503] * 6
        print(f"not ready, then killed after {killed:.1f} s: {kubelet.events}")
