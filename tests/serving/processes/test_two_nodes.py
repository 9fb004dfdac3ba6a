"""One engine on two nodes, as a user starts it: the tokens of one node, and a lost node ends no client in silence."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from armillary.cli.serving.serve_nodes import node_place
from armillary.errors import BadInput
from armillary.serving.processes import node_ranks
from armillary.serving.processes.engine_ipc import NodePlace
from armillary.spec.tables.serve import Serve
from tests.engine.disaggregation.test_disaggregation import free_address
from tests.serving.tiny import Server, run_server

SETTINGS = ("--set", "serve.kv_bytes=20MB", "--set", "serve.dtype=fp32")
BODY = {"model": "tiny", "prompt": "def main", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
LONG = BODY | {"max_tokens": 1500}


@contextmanager
def second_node(folder: Path, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    """The command of a node without a server; what it says goes to node.out."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    line = [
        sys.executable,
        "-m",
        "armillary",
        "serve",
        str(folder),
        "--device",
        "cpu",
        *flags,
        "--set",
        "serve.node_rank=1",
    ]
    with (folder.parent / "node.out").open("ab") as out:
        process = subprocess.Popen(line, env=environment, stdout=out, stderr=out, cwd=folder.parent)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(30)


def children(process: subprocess.Popen[bytes]) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def lose_a_rank(server: Server, pid: Callable[[], int], *, restarts: int) -> None:
    """In the middle of a request, which is told; the engine comes back."""
    said: list[tuple[int, Any]] = []
    client = threading.Thread(target=lambda: said.append(server.post("/v1/completions", LONG)))
    client.start()
    server.until(lambda: server.metric("running") >= 1)
    os.kill(pid(), signal.SIGKILL)
    client.join(30)
    assert [status for status, _ in said] == [503]
    server.until(lambda: server.metric("restarts_total") == restarts and server.is_ready(), 90)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [("--tp", "2"), ("--tp", "2", "--set", "serve.pp=2")], ids=["tp 2", "tp 2 × pp 2"])
def test_two_nodes_give_the_text_of_one_and_either_may_lose_ranks(folder: Path, layout: tuple[str, ...]) -> None:
    flags = (*SETTINGS, *layout, "--set", f"serve.nodes=2@{free_address(1)}")
    with run_server(folder, *SETTINGS) as one:
        expected = one.post("/v1/completions", BODY)[1]["choices"][0]["text"]
    with second_node(folder, *flags) as node, run_server(folder, *flags, "--set", "serve.node_rank=0") as server:
        half = 1 if layout == ("--tp", "2") else 2
        assert len(server.engine_pids()) == len(children(node)) == half

        def text() -> str:
            return str(server.post("/v1/completions", BODY)[1]["choices"][0]["text"])

        assert text() == expected
        lose_a_rank(server, lambda: children(node)[0], restarts=1)
        assert text() == expected
        lose_a_rank(server, lambda: server.engine_pids()[0], restarts=2)
        assert text() == expected

        node.kill()  # a machine that is gone: the server waits for it, and goes on with the one that takes its place
        server.until(lambda: not server.is_ready())
        assert server.post("/v1/completions", BODY)[0] == 503
        server.until(lambda: "waiting for node 1 of 2" in server.log.read_text())
        with second_node(folder, *flags):
            server.until(server.is_ready, 90)
            assert text() == expected


@pytest.mark.parametrize(
    ("nodes", "rank", "says"),
    [
        ("2", 0, "not N@HOST:PORT"),
        ("2@first:port", 0, "not N@HOST:PORT"),
        ("1@first:29500", 0, "not N@HOST:PORT"),
        ("2@first:29500", None, "among 2 is unknown; set serve.node_rank"),
        ("2@first:29500", 2, "among 2 is 2; set serve.node_rank"),
    ],
)
def test_one_line_says_what_is_missing(
    nodes: str, rank: int | None, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLURM_NODEID", "JOB_COMPLETION_INDEX", "GROUP_RANK"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(BadInput, match=says):
        node_place(Serve(nodes=nodes, node_rank=rank))


def test_a_node_says_once_why_it_is_not_connected_and_goes_on_trying(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_ranks, "_CONNECT_EVERY_S", 0.01)
    host, _, port = free_address(1).rpartition(":")
    said: list[str] = []
    refused = threading.Event()

    def say(text: str) -> None:
        said.append(text)
        refused.set()

    def listen() -> None:
        refused.wait(10)
        time.sleep(0.1)  # some more tries, which say nothing
        with socket.create_server((host, int(port))) as server:
            server.accept()[0].close()

    first = threading.Thread(target=listen)
    first.start()
    node_ranks._connected_to(NodePlace(count=2, rank=1, host=host, port=int(port)), say).close()
    first.join(10)
    assert len(said) == 1 and "not connected yet (Connection refused)" in said[0]


def test_launchers_number_the_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_NODEID", "3")
    place = node_place(Serve(nodes="4@[fd00::1]:29500"))
    assert (place.count, place.rank, place.host, place.port) == (4, 3, "fd00::1", 29500)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--tp", "3"), "3 ranks (--tp × serve.pp) are not a multiple of 2 nodes"),
        (
            ("--tp", "2", "--set", "serve.role=prefill", "--set", "serve.prefill=h:9"),
            "serve.role=prefill is for ranks on one node",
        ),
    ],
)
def test_one_line_says_what_cannot_be(folder: Path, flags: tuple[str, ...], says: str) -> None:
    nodes = ("--set", "serve.nodes=2@127.0.0.1:29500", "--set", "serve.node_rank=1")
    line = [sys.executable, "-m", "armillary", "serve", str(folder), "--device", "cpu", *nodes, *flags]
    ran = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 2 and says in ran.stderr
