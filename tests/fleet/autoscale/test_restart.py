"""The autoscaler is killed and started again, with real processes: no flapping, and no server is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from armillary.fleet.autoscale.decision_log import AutoscalerStart, Logged, read_log
from armillary.spec.hf.config import to_hf
from armillary.spec.recipe import recipe_from_dict

RECIPE = """
[model]
path = "bot"
[hardware]
on = "l4"
[serve]
emulate = true
max_running = 16
max_model_len = 1024
[traffic]
requests_per_s = 2.0
tokens_in = 64
tokens_out = 20
duration_s = 60.0
[objective]
ttft_p99_s = 2.0
[fleet]
replicas = 2
start_s = 1.0
[autoscale]
min_replicas = 2
max_replicas = 4
interval_s = 1.0
stable_window_s = 10.0
panic_window_s = 3.0
cooldown_s = 10.0
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = recipe_from_dict({"model": {"name": "llama-3-8b"}}).model_config()
    (tmp_path / "bot").mkdir()
    (tmp_path / "bot" / "config.json").write_text(json.dumps(to_hf(config)))
    (tmp_path / "service.toml").write_text(RECIPE)
    return tmp_path


@contextmanager
def service(folder: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    line = [
        sys.executable,
        "-m",
        "armillary",
        "up",
        "service.toml",
        "--port",
        str(port),
        "--home",
        str(folder / "home"),
    ]
    with (folder / "up.log").open("ab") as log:
        process = subprocess.Popen(line, cwd=folder, stdout=log, stderr=log)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait(60)


def until(true: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.2)


def state(port: int) -> dict[str, Any]:
    try:
        with urlopen(f"http://127.0.0.1:{port}/service.json", timeout=2) as answer:
            return dict(json.load(answer))
    except OSError:
        return {"replicas": []}


def ready(port: int) -> dict[str, str]:
    """Name -> address of the replicas that are ready."""
    return {each["name"]: each["url"] for each in state(port)["replicas"] if each["state"] == "ready"}


def servers(folder: Path) -> list[int]:
    """Processes of this folder's service."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if str(folder) in line and int(entry.name) != os.getpid():
                found.append(int(entry.name))
    return found


def ask(port: int, statuses: list[int]) -> None:
    body = json.dumps({"model": "bot", "prompt": [5] * 64, "max_tokens": 10}).encode()
    request = Request(
        f"http://127.0.0.1:{port}/v1/completions", body, {"content-type": "application/json"}, method="POST"
    )
    try:
        with urlopen(request, timeout=30) as answer:
            statuses.append(answer.status)
    except OSError:
        statuses.append(0)


def load(port: int, seconds: float) -> list[int]:
    statuses: list[int] = []
    threads = []
    for _ in range(round(2 * seconds)):
        threads.append(threading.Thread(target=ask, args=(port, statuses)))
        threads[-1].start()
        time.sleep(0.5)
    for thread in threads:
        thread.join()
    return statuses


@pytest.mark.slow
def test_a_killed_autoscaler_finds_its_servers_and_changes_nothing(folder: Path) -> None:
    with service(folder, 18_761) as first:
        until(lambda: len(ready(18_761)) == 2, 120.0)
        assert set(load(18_761, 6.0)) == {200}
        before = ready(18_761)
        first.kill()
        first.wait()
    assert len(servers(folder)) >= 4  # two servers, each with a keeper
    with service(folder, 18_762):
        until(lambda: len(ready(18_762)) == 2, 60.0)
        assert set(load(18_762, 12.0)) == {200}
        assert ready(18_762) == before
    assert not servers(folder)
    lines = read_log(next((folder / "home").glob("**/decisions.jsonl")))
    assert sum(isinstance(line, AutoscalerStart) for line in lines) == 2
    assert not [line for line in lines if isinstance(line, Logged) and line.decision.change]


@pytest.mark.slow
def test_servers_end_where_nobody_starts_it_again(folder: Path) -> None:
    with service(folder, 18_763) as only:
        until(lambda: len(ready(18_763)) == 2, 120.0)
        only.kill()
        only.wait()
    until(lambda: not servers(folder), 120.0)
