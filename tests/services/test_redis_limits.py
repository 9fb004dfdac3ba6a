"""Limits in a real Redis: exact for 50 clients of three gateways, also while Redis is killed and restarted."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from armillary.fleet.gateway.limits import Charge
from armillary.fleet.gateway.redis.limits import RedisLimiter

pytestmark = pytest.mark.services
CLIENTS, PROCESSES = 50, 3

GATEWAY = f"""
import asyncio, json, sys, time
from armillary.fleet.gateway.limits import Charge
from armillary.fleet.gateway.redis.limits import LimiterUnavailable, RedisLimiter

async def client(limiter, name, until, cost, granted):
    number = 0
    while time.time() < until:
        number += 1
        request = f"{{name}}-{{number}}"
        try:
            if await limiter.reserve(request, [Charge("k", cost, 40, 2.0)]) is None:
                granted.append((time.time(), request))
        except LimiterUnavailable:
            pass
        await asyncio.sleep(0.01)

async def main():
    limiter, granted = RedisLimiter(sys.argv[1], lambda line: None), []
    names = [f"{{sys.argv[2]}}-{{i}}" for i in range({CLIENTS} // {PROCESSES} + 1)]
    await asyncio.gather(*(client(limiter, name, float(sys.argv[3]), 1, granted) for name in names))
    await limiter.close()
    print(json.dumps(granted))

asyncio.run(main())
"""


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Redis:
    """A Redis that keeps what it acknowledged, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        line = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder)]
        line += ["--appendonly", "yes", "--appendfsync", "always", "--save", ""]
        self.process = subprocess.Popen(line, stdout=subprocess.DEVNULL)
        end = time.monotonic() + 30
        while time.monotonic() < end:
            try:
                with socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
                    connection.sendall(b"PING\r\n")
                    if connection.recv(100).startswith(b"+PONG"):
                        return
            except OSError:
                pass
            time.sleep(0.02)
        raise AssertionError("Redis does not answer")

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()


@contextmanager
def redis_server(folder: Path) -> Iterator[Redis]:
    server = Redis(folder)
    server.start()
    try:
        yield server
    finally:
        server.kill()


def most_in_any_window(times: list[float], window_s: float) -> int:
    return max(sum(1 for at in times if end - window_s < at <= end) for end in times)


def entries_of(server: Redis) -> list[tuple[float, str]]:
    """(seconds, request) of the window as Redis has it."""
    text = subprocess.run(
        ["redis-cli", "-p", str(server.port), "--json", "ZRANGE", "armillary:limit:{k}:times", "0", "-1", "WITHSCORES"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return [(float(score) / 1e6, request) for request, score in json.loads(text)]


def test_fifty_clients_of_three_gateways_get_exactly_the_limit_while_redis_is_killed(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        until = time.time() + 12.0
        children = [
            subprocess.Popen([sys.executable, "-c", GATEWAY, server.url, str(i), str(until)], stdout=subprocess.PIPE)
            for i in range(PROCESSES)
        ]
        history: dict[str, float] = {}
        restarted_at = 0.0
        while any(child.poll() is None for child in children):
            history |= {request: at for at, request in entries_of(server)}
            if not restarted_at and time.time() > until - 6.0:
                server.kill()
                time.sleep(0.5)
                server.start()
                restarted_at = time.time()
            time.sleep(0.2)
        outputs = [json.loads(child.communicate()[0]) for child in children]
        history |= {request: at for at, request in entries_of(server)}
    granted = {request for output in outputs for _, request in output}
    assert granted <= set(history), "everything that was granted was counted"
    times = [history[request] for request in granted]
    assert set(history) - granted == set(), "and nothing was counted that was not granted"
    assert most_in_any_window(times, 2.0) <= 40
    first = min(times)
    assert sum(1 for at in times if at < first + 2.0) == 40, "not one less than the limit where more was asked for"
    assert max(times) > restarted_at > 0, "it went on after the restart"


def test_tokens_are_corrected_and_windows_are_those_of_the_local_limiter(tmp_path: Path) -> None:
    async def run(url: str) -> None:
        limiter = RedisLimiter(url, print)
        requests, tokens = Charge("r", 1, 10, 60.0), Charge("t", 60, 100, 60.0)
        assert await limiter.reserve("1", [requests, tokens]) is None
        assert await limiter.reserve("1", [requests, tokens]) is None, "the same request, sent again, counts once"
        refusal = await limiter.reserve("2", [requests, tokens])
        assert refusal is not None and refusal.charge.bucket == "t" and 50 < refusal.retry_after_s <= 60
        for number in range(9):
            assert await limiter.reserve(f"r{number}", [requests]) is None, "the refused request took nothing"
        assert await limiter.reserve("r9", [requests]) is not None
        await limiter.correct("1", [requests, tokens], [1, 20])
        assert await limiter.reserve("3", [Charge("t", 80, 100, 60.0)]) is None
        await limiter.correct("3", [Charge("t", 80, 100, 60.0)], [500])
        assert await limiter.reserve("4", [Charge("t", 1, 100, 60.0)]) is not None, "never more than was reserved"
        for _ in range(2):
            assert await limiter.reserve(f"w{time.time()}", [Charge("w", 5, 5, 0.3)]) is None
            await asyncio.sleep(0.35)
        await limiter.close()

    with redis_server(tmp_path) as server:
        asyncio.run(run(server.url))
