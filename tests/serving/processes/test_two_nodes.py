"""One engine on two nodes, as a user starts it: the tokens of one node, and a lost node ends no client in silence."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from armillary import __version__
from armillary.cli.serving.serve_nodes import node_place
from armillary.errors import BadInput
from armillary.serving.processes import node_ranks
from armillary.serving.processes.engine_ipc import EngineConfig, NodePlace
from armillary.serving.processes.node_messages import hello, line
from armillary.serving.processes.node_ranks import OtherNodes
from armillary.spec.tables.serve import Serve
from armillary.store.home import Home
from tests.engine.disaggregation.test_disaggregation import free_address
from tests.serving.tiny import Server, run_server

SETTINGS = ("--set", "serve.kv_bytes=20MB", "--set", "serve.dtype=fp32")
BODY = {"model": "tiny", "prompt": "def main", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
LONG = BODY | {"max_tokens": 1500}


@contextmanager
def second_node(folder: Path, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    """The command of a node without a server; what it says goes to node.out."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [
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
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=out, cwd=folder.parent)
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


WELCOME = line({"welcome": 1, "version": __version__})


def of_node(node: NodePlace, **serve: Any) -> EngineConfig:
    return EngineConfig(model="m", serve=Serve(**serve), home=Home.at("unused"), nodes=node)


HELLO = hello(of_node(NodePlace(count=2, rank=1)), 4)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_ranks, "_CONNECT_EVERY_S", 0.01)
    monkeypatch.setattr(node_ranks, "_HELLO_S", 0.2)
    monkeypatch.setattr(node_ranks, "_LOOK_EVERY_S", 0.02)


@contextmanager
def first_node(*answers: bytes) -> Iterator[NodePlace]:
    """What answers a node's connections, one answer each; the last one is for all that follow."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            left = list(answers)
            while True:
                try:
                    sock, _ = server.accept()
                except OSError:
                    return
                sockets.append(sock)
                sock.settimeout(5)
                sent = left.pop(0) if len(left) > 1 else left[0]
                with suppress(OSError):  # a node that has heard enough
                    sock.recv(4096)
                    sock.sendall(sent)
                    if sent != WELCOME:
                        sock.shutdown(socket.SHUT_WR)

        sockets: list[socket.socket] = []
        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        try:
            yield NodePlace(count=2, rank=1, host="127.0.0.1", port=server.getsockname()[1])
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join(10)
            for sock in sockets:
                sock.close()


def test_a_node_says_once_why_it_is_not_connected_and_goes_on_trying(quick: None) -> None:
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
            sock = server.accept()[0]
            sock.sendall(WELCOME)
            sock.close()

    first = threading.Thread(target=listen)
    first.start()
    node_ranks._joined(NodePlace(count=2, rank=1, host=host, port=int(port)), HELLO, say).sock.close()
    first.join(10)
    assert len(said) == 1 and "not connected yet (Connection refused)" in said[0]


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n", "it sent 'HTTP/1.1 400 Bad Request'"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "it sent 'SSH-2.0-OpenSSH_9.6'"),
        (b"\x1b[31mred\xff\n", "it sent '?[31mred"),
        (b"[" * 9000 + b"\n", "it sent '[[["),
        (b"17\n", "it sent '17'"),
        (b"x" * 100_000, "a line of more than 65,536 bytes"),
        (b"", "it sent nothing"),
        (line({"welcome": "yes"}), "its message has no welcome"),
    ],
    ids=["http", "ssh", "escape codes", "nested", "no object", "long line", "silence", "no number"],
)
def test_something_else_on_the_port_is_one_line_and_the_node_tries_again(quick: None, answer: bytes, says: str) -> None:
    said: list[str] = []
    with first_node(answer, answer, answer, WELCOME) as node:
        node_ranks._joined(node, HELLO, said.append).sock.close()
    assert len(said) == 1 and says in said[0] and "is not the first node of an engine" in said[0]
    assert "\x1b" not in said[0] and "\n" not in said[0] and len(said[0]) < 300


def test_a_node_that_is_refused_ends_with_the_reason(quick: None) -> None:
    refused = line({"refused": "node 1 has armillary '0.0.1'"})
    with (
        first_node(refused) as node,
        pytest.raises(BadInput, match=r"refuses this one: .*has armillary"),
    ):
        node_ranks._joined(node, HELLO, lambda text: None)


@pytest.mark.parametrize(
    "message",
    [b"GET / HTTP/1.1\n", b"{}\n", line({"start": "now"}), line({"start": 1}), b"y" * 100_000],
    ids=["text", "empty", "no number", "no port", "long line"],
)
def test_a_first_node_that_goes_wrong_is_given_up_and_joined_again(quick: None, message: bytes) -> None:
    said: list[str] = []
    joined = 0

    def say(text: str) -> None:
        nonlocal joined
        said.append(text)
        joined += "ranks start when" in text
        if joined == 2:
            raise KeyboardInterrupt  # the user

    with first_node(WELCOME + message, WELCOME) as node, pytest.raises(KeyboardInterrupt):
        node_ranks.serve_node(of_node(node), 2, say)
    assert sum("the connection to the first node is given up: it" in text for text in said) == 1


def test_the_first_node_refuses_what_is_no_node_of_its_engine_and_goes_on(quick: None) -> None:
    host, _, port = free_address(1).rpartition(":")
    said: list[str] = []
    sent = {
        b"GET / HTTP/1.1\r\nHost: here\r\n\r\n": "it sent 'GET / HTTP/1.1'",
        b"z" * 100_000 + b"\n": "127.0.0.1 connected and is not a node of this engine",
        line(HELLO | {"node": [1]}): "its message has no node",
        line(HELLO | {"version": "0.0.1"}): "has armillary '0.0.1', the first node",
        line(HELLO | {"node": 2}): "has another serve.nodes or serve.node_rank",
        line(HELLO | {"of": 3}): "has another serve.nodes or serve.node_rank",
        line(HELLO | {"settings": 1}): "node 1 has ranks 'None', the first node '4'; start the same command on both",
        line(hello(of_node(NodePlace(count=2, rank=1)), 2)): "node 1 has ranks '2', the first node '4'",
        line(hello(of_node(NodePlace(count=2, rank=1), dtype="bf16"), 4)): "add --set serve.dtype=auto on both",
    }

    async def serve() -> list[bytes]:
        nodes = OtherNodes(of_node(NodePlace(count=2, rank=0, host=host, port=int(port))), 4, said.append)
        starting = asyncio.create_task(nodes.start(7))
        await asyncio.sleep(0.05)
        answers = []
        for data in [*sent, *sent, line(HELLO)]:
            reader, writer = await asyncio.open_connection(host, int(port))
            with suppress(OSError):
                writer.write(data)
                await writer.drain()
                answers.append(await asyncio.wait_for(reader.readline(), 5))
            if data != line(HELLO):
                writer.close()
        await asyncio.wait_for(starting, 5)
        answers.append(await asyncio.wait_for(reader.readline(), 5))
        nodes._server.close()  # type: ignore[union-attr]
        writer.close()
        await asyncio.sleep(0.1)  # the first node's side closes too
        return answers

    answers = asyncio.run(serve())
    assert answers[-2:] == [WELCOME, line({"start": 1, "port": 7})]
    for says in set(sent.values()):
        assert sum(says in text for text in said) >= 1, (says, said)
    assert len(said) == len(set(said)), "each is said once"
    assert any(b"refused" in answer and b"0.0.1" in answer for answer in answers)


def test_of_two_processes_of_one_node_the_later_one_stays(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each would take the other's place for ever, with a start of the engine every time."""
    monkeypatch.setattr(node_ranks._LocalRanks, "start", lambda ranks, number, port: None)
    host, _, port = free_address(1).rpartition(":")
    place = NodePlace(count=2, rank=1, host=host, port=int(port))

    async def serve() -> list[str]:
        nodes = OtherNodes(of_node(replace(place, rank=0)), 4, lambda text: None)
        starting = asyncio.create_task(nodes.start(7))
        await asyncio.sleep(0.05)
        ends = []
        for _ in range(2):
            ends.append(asyncio.create_task(asyncio.to_thread(until_it_ends, place)))
            await asyncio.sleep(0.3)
        assert nodes.lost == "node 1 has started again" and not ends[1].done()
        await asyncio.wait_for(starting, 5)
        for writer in nodes._writers.values():
            writer.write(line({"refused": "enough"}))
        nodes._server.close()  # type: ignore[union-attr]
        return [await asyncio.wait_for(end, 5) for end in ends]

    first, second = asyncio.run(serve())
    assert "refuses this one: 'another process has connected as node 1'" in first and "'enough'" in second


def until_it_ends(place: NodePlace) -> str:
    try:
        node_ranks.serve_node(of_node(place), 4, lambda text: None)
    except BadInput as error:
        return str(error)
    return ""


def test_ranks_that_cannot_be_started_are_lost_and_the_reason_is_told(
    quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spawn(*_: Any) -> Any:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(node_ranks, "spawn", spawn)
    said: list[str] = []
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(line({"start": 3, "port": 7}))
        theirs.shutdown(socket.SHUT_WR)
        node = of_node(NodePlace(count=2, rank=1))
        node_ranks._obey(node_ranks.Lines(ours), node_ranks._LocalRanks(node, 2), said.append)
        assert theirs.recv(4096) == line({"lost": 3, "why": "Cannot allocate memory"})
    assert said[1] == "a rank has ended (Cannot allocate memory); waiting for the next start"


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
    command = [sys.executable, "-m", "armillary", "serve", str(folder), "--device", "cpu", *nodes, *flags]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 2 and says in ran.stderr
