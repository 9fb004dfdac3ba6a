"""Gateways and replicas as processes that are killed or stopped: limits go on in another gateway, no client hangs."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from armillary.fleet.gateway.keys import KeyFile
from tests.services.test_redis_limits import free_port, redis_server

pytestmark = pytest.mark.services
REPLICA = """
import asyncio, signal, sys
from tests.fleet.gateway.replicas import FakeReplica

async def main():
    replica = FakeReplica(tokens=int(sys.argv[2]), gap_s=0.05, port=int(sys.argv[1]))
    await replica.start()
    for number, gap_s in ((signal.SIGUSR1, 1.0), (signal.SIGUSR2, 0.05)):  # slow, and quick again
        asyncio.get_running_loop().add_signal_handler(number, setattr, replica, "gap_s", gap_s)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@dataclass
class Running:
    """A process that answers on a port."""

    process: subprocess.Popen[bytes]
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str) -> tuple[int, Any]:
        return _call(urllib.request.Request(self.url + path))

    def post(self, key: str = "", **fields: Any) -> tuple[int, Any]:
        body = json.dumps({"model": "bot", "prompt": "x", **fields}).encode()
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        return _call(urllib.request.Request(f"{self.url}/v1/completions", body, headers))

    def stream(self) -> Any:
        body = json.dumps({"model": "bot", "prompt": "x", "stream": True}).encode()
        return urllib.request.urlopen(urllib.request.Request(f"{self.url}/v1/completions", body), timeout=60)


def _call(request: urllib.request.Request) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@contextmanager
def running(line: list[str], port: int, path: str = "/ready") -> Iterator[Running]:
    found = Running(subprocess.Popen([sys.executable, *line]), port)
    try:
        until(lambda: _answers(found, path), 60)
        yield found
    finally:
        found.process.kill()
        found.process.wait()


def _answers(found: Running, path: str) -> bool:
    assert found.process.poll() is None
    try:
        return found.get(path)[0] in (200, 503)
    except OSError:
        return False


def until(check: Callable[[], bool], seconds: float) -> float:
    """Time until it was true."""
    begin = time.monotonic()
    while not check():
        assert time.monotonic() - begin < seconds
        time.sleep(0.02)
    return time.monotonic() - begin


def replica(tokens: int = 3, port: int = 0) -> Any:
    port = port or free_port()
    return running(["-c", REPLICA, str(port), str(tokens)], port)


def gateway(folder: Path, *urls: str, redis: str = "") -> Any:
    port = free_port()
    replicas = ", ".join(f'{{ url = "{url}" }}' for url in urls)
    config = folder / f"{port}.toml"
    redis_line = f'redis = "{redis}"\n' if redis else ""
    config.write_text(
        f"[gateway]\n{redis_line}idle_timeout_s = 1.5\nslow_grace_s = 5\naudit = '{folder / str(port)}.jsonl'\n"
        f'[[models]]\nname = "bot"\npolicy = "round-robin"\nreplicas = [{replicas}]\n'
    )
    line = ["-m", "armillary", "gateway", "--config", str(config), "--port", str(port), "--home", str(folder)]
    return running(line, port)


def test_another_gateway_goes_on_with_the_same_limits(tmp_path: Path) -> None:
    _, key = KeyFile(tmp_path / "gateway" / "keys.json").add("alice", limits={"requests": 10, "window_s": 600.0})
    with (
        redis_server(tmp_path) as redis,
        replica() as behind,
        gateway(tmp_path, behind.url, redis=redis.url) as first,
        gateway(tmp_path, behind.url, redis=redis.url) as second,
    ):
        assert [first.post(key)[0] for _ in range(4)] == [200] * 4
        first.process.send_signal(signal.SIGKILL)
        assert [second.post(key)[0] for _ in range(8)] == [200] * 6 + [429] * 2


def test_replicas_that_are_killed_and_stopped_in_the_middle(tmp_path: Path) -> None:
    """Before the first token another replica answers; after it the stream ends with an error, within the time limit; a
    replica is out of rotation within five seconds, and back when it works."""
    with replica(tokens=100) as one, replica(tokens=100) as two, gateway(tmp_path, one.url, two.url) as front:

        def up() -> int:
            return int(front.get("/ready")[1]["replicas_up"]["bot"])

        until(lambda: up() == 2, 10)
        streams = [front.stream() for _ in range(4)]
        assert all(b"tok" in stream.readline() for stream in streams)
        one.process.send_signal(signal.SIGSTOP)
        assert until(lambda: up() == 1, 10) < 5, "out of rotation while it hangs"
        texts = [stream.read().decode() for stream in streams]
        assert sum("silent for too long" in text for text in texts) == 2 == sum("[DONE]" in text for text in texts)
        assert [front.post()[0] for _ in range(4)] == [200] * 4
        one.process.send_signal(signal.SIGCONT)
        assert until(lambda: up() == 2, 10) < 5, "back when it works"
        streams = [front.stream() for _ in range(4)]
        assert all(b"tok" in stream.readline() for stream in streams)
        one.process.kill()
        texts = [stream.read().decode() for stream in streams]
        assert sum("it closed the connection" in text for text in texts) == 2 == sum("[DONE]" in text for text in texts)
        assert [front.post()[0] for _ in range(4)] == [200] * 4, "tried elsewhere before the first token"
        assert until(lambda: up() == 1, 10) < 5
        with replica(port=one.port):
            assert until(lambda: up() == 2, 10) < 5


def test_a_replica_that_becomes_slow_in_the_middle(tmp_path: Path) -> None:
    """It sends a token per second, and its health checks pass: out of rotation within five seconds, new requests go to
    the other, its own streams end with an error after `slow_grace_s`, and it is back when it is quick."""
    with replica(tokens=200) as one, replica(tokens=200) as two, gateway(tmp_path, one.url, two.url) as front:

        def up() -> int:
            return int(front.get("/ready")[1]["replicas_up"]["bot"])

        until(lambda: up() == 2, 10)
        streams = [front.stream() for _ in range(4)]
        assert all(b"tok" in stream.readline() for stream in streams)
        time.sleep(2.0)
        one.process.send_signal(signal.SIGUSR1)
        assert until(lambda: up() == 1, 10) < 5
        begin = time.monotonic()
        assert b"[DONE]" in front.stream().read(), "sent to the other"
        texts = [stream.read().decode() for stream in streams]
        assert time.monotonic() - begin < 20, "200 tokens would take 200 s"
        assert sum("far slower than other replicas" in text for text in texts) == 2
        assert sum("[DONE]" in text for text in texts) == 2
        one.process.send_signal(signal.SIGUSR2)
        assert until(lambda: up() == 2, 20) < 15
