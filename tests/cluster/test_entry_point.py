"""The entry point of a container as a process: what its probes see, and SIGTERM within the grace period."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from armillary.cluster.kubernetes.manifests import HEALTH_PORT, entry_point
from armillary.cluster.node import INTERRUPTED
from armillary.cluster.node_health import LIVE, READY, answer
from armillary.store.home import Home
from armillary.store.runs import find_run
from tests.cluster.test_kubernetes import a_job
from tests.services.small_training import RECIPE, write_text

ROOT = Path(__file__).parents[2]
GRACE_S = 60.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def started(words: list[str], folder: Path) -> Iterator[subprocess.Popen[str]]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(words, env=env, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def status(port: int, path: str) -> int:
    """Of the answer; 0 before anything listens."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answered:
            return int(answered.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def wait_for(done: Callable[[], bool], process: subprocess.Popen[str], limit_s: float) -> None:
    end = time.monotonic() + limit_s
    while not done():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end
        time.sleep(0.05)


def test_the_probes_of_a_pod_and_its_entry_point_agree() -> None:
    words = entry_point(a_job())
    assert words[words.index("--health-port") + 1] == str(HEALTH_PORT) and words[:3] == [
        "python3",
        "-m",
        "armillary.cluster.node",
    ]
    assert answer(LIVE, 1)[0] == 200 and answer(READY, 1) == (503, "0 of 1 ranks run") and answer("/", 1)[0] == 404


def test_a_pod_that_waits_for_the_first_one_is_live_and_ends_when_told(tmp_path: Path) -> None:
    port = free_port()
    more = f"--nodes 2 --ranks 1 --node-rank 1 --id fox --health-port {port} --resolve-s 60 --rendezvous no.invalid:1"
    words = [sys.executable, "-m", "armillary.cluster.node", *more.split(), "--", "train", "r.toml"]
    with started(words, tmp_path) as process:
        wait_for(lambda: status(port, LIVE) == 200, process, 30)
        assert status(port, READY) == 503
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 128 + signal.SIGTERM


@pytest.mark.slow
@pytest.mark.parametrize("to_rank", [False, True], ids=["to the pod", "to a rank"])
def test_sigterm_saves_within_the_grace_period(tmp_path: Path, to_rank: bool) -> None:
    """A rank that is told alone, as when another pod of the job is evicted, ends the pod with a code that makes the
    cluster start it again."""
    write_text(tmp_path / "text")
    recipe = RECIPE.format(text=tmp_path / "text", steps=100_000, more=f"grace_s = {GRACE_S}")
    (tmp_path / "r.toml").write_text(recipe.replace("dp = 2", "dp = 1"))
    port = free_port()
    more = f"--nodes 1 --ranks 1 --id fox --health-port {port} --stop-s {GRACE_S} --rendezvous 127.0.0.1:{free_port()}"
    train = ["train", "r.toml", "--run", "fox", "--devices", "1", "--yes", "--home", str(tmp_path)]
    words = [sys.executable, "-m", "armillary.cluster.node", *more.split(), "--", *train]
    with started(words, tmp_path) as process:
        wait_for(lambda: status(port, READY) == 200, process, 120)
        wait_for(lambda: _step(tmp_path) > 0, process, 300)
        begin = time.monotonic()
        if to_rank:
            import psutil

            next(each for each in psutil.Process(process.pid).children() if "armillary" in each.cmdline()).terminate()
        else:
            process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=GRACE_S)
        assert time.monotonic() - begin < GRACE_S
        assert process.returncode == (INTERRUPTED if to_rank else 128 + signal.SIGTERM), said
    run = find_run(Home.at(tmp_path), "fox")
    assert run.state.state == "interrupted" and "checkpoint" in said, said


def _step(home: Path) -> int:
    try:
        return int(find_run(Home.at(home), "fox").progress.step)
    except Exception:
        return 0
