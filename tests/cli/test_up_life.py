"""`armillary up` with real servers of a tiny model: one command starts everything, one Ctrl-C ends it; killed and
started again it adopts its servers, and killed for good it leaves none behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serving.tiny import make_folder

pytestmark = pytest.mark.slow
LEASE_S = 60.0


class Life:
    """A service in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.processes = folder, list[subprocess.Popen[bytes]]()
        model = make_folder(folder / "made")
        text = f'[model]\npath = "{model}"\n[serve]\nname = "bot"\nkv_bytes = 20_000_000\ndtype = "fp32"\nthreads = 1\n'
        (folder / "service.toml").write_text(text + "[fleet]\nreplicas = 2\n")

    def start(self) -> subprocess.Popen[bytes]:
        line = [sys.executable, "-m", "armillary", "up", "service.toml", "--port", "0", "--home", str(self.folder)]
        with (self.folder / "up.log").open("wb") as log:
            process = subprocess.Popen(line, cwd=self.folder, stdout=log, stderr=subprocess.STDOUT)
        self.processes.append(process)
        self.until(lambda: "ready on http" in self.said, 120)
        return process

    @property
    def said(self) -> str:
        return (self.folder / "up.log").read_text()

    def get(self, path: str) -> Any:
        url = self.said.partition("ready on ")[2].split()[0]
        with urllib.request.urlopen(f"{url}{path}", timeout=10) as answer:
            return json.load(answer)

    def ready(self) -> int:
        replicas = self.get("/service.json")["replicas"]
        return sum(each["state"] == "ready" and each["healthy"] for each in replicas)

    def servers(self) -> set[int]:
        """Processes that name this folder, `up` itself left out."""
        found = set()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) not in {each.pid for each in self.processes}:
                try:
                    words = (entry / "cmdline").read_bytes()
                except OSError:
                    continue
                if str(self.folder).encode() in words and b"armillary" in words:
                    found.add(int(entry.name))
        return found - {os.getpid()}

    def until(self, check: Callable[[], bool], seconds: float) -> float:
        begin = time.monotonic()
        while not check():
            assert time.monotonic() - begin < seconds, self.said
            time.sleep(0.2)
        return time.monotonic() - begin


@pytest.fixture
def life(tmp_path: Path) -> Iterator[Life]:
    made = Life(tmp_path)
    yield made
    for process in made.processes:
        process.kill()
        process.wait()
    for pid in made.servers():
        os.kill(pid, signal.SIGKILL)


def test_killed_started_again_and_ended_with_ctrl_c(life: Life) -> None:
    first = life.start()
    life.until(lambda: life.ready() == 2, 180)
    servers = life.servers()
    first.kill()
    first.wait()
    second = life.start()
    adopted_s = life.until(lambda: life.ready() == 2, 60)
    assert life.servers() == servers and "2 replicas of bot run already and are adopted" in life.said
    second.send_signal(signal.SIGINT)
    assert second.wait(60) == 0
    left_s = life.until(lambda: not life.servers(), 20)
    print(f"adopted {adopted_s:.1f} s after it was ready; after Ctrl-C no process was left within {left_s:.1f} s")


def test_killed_for_good(life: Life) -> None:
    first = life.start()
    life.until(lambda: life.ready() == 2, 180)
    first.kill()
    first.wait()
    gone_s = life.until(lambda: not life.servers(), LEASE_S + 90)
    print(f"the servers ended {gone_s:.1f} s after their service was killed")
