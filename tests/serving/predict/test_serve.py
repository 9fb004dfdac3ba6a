"""`armillary serve model.pt2` as people run it: a process, asked over HTTP, put under load, stopped with SIGTERM."""

from __future__ import annotations

import json
import re
import signal
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from armillary.serving.load.run import LoadTest, load_test
from armillary.spec.tables.traffic import Load, Objective, Traffic
from tests.fork_server import Command, ForkServer
from tests.serving.generated_requests import run_schemathesis

LIMIT_S = 60


@pytest.fixture
def server(files: dict[str, Path], tmp_path: Path, fork_server: ForkServer) -> Iterator[tuple[str, Command]]:
    """(address, process)"""
    command = fork_server.start(["serve", str(files["one"]), "--port", "0", "--trust"], tmp_path / "log")
    end = time.monotonic() + LIMIT_S
    while (found := re.search(r"ready on (http://\S+)/predict", command.out)) is None:
        assert command.poll() is None and time.monotonic() < end, f"the server did not start: {command.err}"
        time.sleep(0.02)
    yield found[1], command
    command.kill()
    command.wait()


def ask(url: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data=data), timeout=20) as response:
        return json.loads(response.read())


def test_it_answers_bears_load_and_leaves_with_0(server: tuple[str, Command]) -> None:
    url, process = server
    assert ask(f"{url}/predict", {"features": [1, 2, 3, 4]})["prediction"] == [10.0, 11.0]
    assert ask(f"{url}/health")["model_loaded"] is True
    test = LoadTest(traffic=Traffic(requests_per_s=60, duration_s=1.0), load=Load(warmup_s=0.1), objective=Objective())
    report = load_test(url, test)
    assert report.api == "predict" and report.last.failed == 0 and report.last.requests == 60
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0


@pytest.mark.slow
@pytest.mark.parametrize("paths", ["/predict", "/v2"])
def test_requests_made_from_its_document(server: tuple[str, Command], tmp_path: Path, paths: str) -> None:
    """Also of KServe's protocol, with the model's own name, version and tensor."""

    def known(document: Any) -> None:
        model = ask(f"{server[0]}/v2/models/one")
        names = {"name": "one", "version": model["versions"][0]}
        for path in document["paths"].values():
            for parameter in path.get("parameters", ()):
                parameter["schema"] = {"type": "string", "enum": [names[parameter["name"]]]}
        for path, calls in document["paths"].items():
            if path.endswith("/infer"):
                tensor = calls["post"]["requestBody"]["content"]["application/json"]["schema"]["properties"]["inputs"]
                tensor["items"]["properties"]["name"] = {"enum": [model["inputs"][0]["name"]]}

    assert run_schemathesis(server[0], paths, tmp_path, examples=100, change=known) > 50
