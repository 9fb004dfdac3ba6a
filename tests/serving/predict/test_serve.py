"""`armillary serve model.pt2` as people run it: a process, asked over HTTP, put under load, stopped with SIGTERM."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from armillary.serving.load.run import LoadTest, load_test
from armillary.spec.tables.serve import Load, Objective, Traffic

LIMIT_S = 60


@pytest.fixture
def server(files: dict[str, Path]) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """(address, process)"""
    command = [sys.executable, "-m", "armillary", "serve", str(files["one"]), "--port", "0", "--trust"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        timer = threading.Timer(LIMIT_S, process.kill)
        timer.start()
        assert process.stdout is not None
        lines = (re.search(r"ready on (http://\S+)/predict", line) for line in process.stdout)
        found = next(filter(None, lines), None)
        assert found, "the server did not start"
        yield found[1], process
        timer.cancel()
        process.kill()


def ask(url: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data=data), timeout=20) as response:
        return json.loads(response.read())


def test_it_answers_bears_load_and_leaves_with_0(server: tuple[str, subprocess.Popen[str]]) -> None:
    url, process = server
    assert ask(f"{url}/predict", {"features": [1, 2, 3, 4]})["prediction"] == [10.0, 11.0]
    assert ask(f"{url}/health")["model_loaded"] is True
    test = LoadTest(traffic=Traffic(requests_per_s=60, duration_s=1.0), load=Load(warmup_s=0.1), objective=Objective())
    report = load_test(url, test)
    assert report.api == "predict" and report.last.failed == 0 and report.last.requests == 60
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
