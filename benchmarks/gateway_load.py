"""The load of benchmarks/gateway.py: requests as fast as they are answered, at a fixed rate, and many streams at once.

Written on asyncio's protocols, because a client library would cost more than the gateway under test. It reports its own
lag: how late requests were sent compared with their schedule, and how late the event loop woke up.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from armillary.stats import percentile

BODY = {
    "model": "bot",
    "messages": [{"role": "user", "content": "Say something about armillary spheres, and how to build one."}],
    "max_tokens": 16,
}
RATE = 200.0
_DUE = re.compile(rb"tok ([0-9.]+)")
_NEXT_STREAM_S = 0.002


class Target(NamedTuple):
    """Where requests go."""

    port: int
    key: str


class Client(asyncio.Protocol):
    """One connection; `on_bytes` is called with what arrives, `on_end` at the end of a response."""

    def __init__(self, on_end: Callable[[], None], on_bytes: Callable[[bytes], None] | None = None) -> None:
        self.on_end, self.on_bytes, self.data = on_end, on_bytes, b""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        if self.on_bytes is not None:
            self.on_bytes(data)
            ended = data.endswith(b"0\r\n\r\n")
        else:
            self.data += data
            ended = self._is_complete()
        if ended:
            self.data = b""
            self.on_end()

    def _is_complete(self) -> bool:
        end = self.data.find(b"\r\n\r\n")
        if end < 0:
            return False
        assert self.data.startswith(b"HTTP/1.1 200"), self.data[:300]
        head = self.data[:end].lower()
        at = head.find(b"content-length:")
        if at < 0:
            return self.data.endswith(b"0\r\n\r\n")
        return len(self.data) >= end + 4 + int(head[at + 15 :].split(b"\r\n", 1)[0])


def request(target: Target, **more: Any) -> bytes:
    body = json.dumps(BODY | more).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{target.port}\r\ncontent-type: application/json\r\n"
    return (head + f"authorization: Bearer {target.key}\r\ncontent-length: {len(body)}\r\n\r\n").encode() + body


async def connect(
    target: Target, on_end: Callable[[], None] = lambda: None, on_bytes: Callable[[bytes], None] | None = None
) -> Client:
    loop = asyncio.get_running_loop()
    _, client = await loop.create_connection(lambda: Client(on_end, on_bytes), "127.0.0.1", target.port)
    return client


async def saturate(target: Target, seconds: float, connections: int = 16) -> dict[str, float]:
    """Requests per second of as many connections that each send the next request when one is answered."""
    count, data, clients = 0, request(target), list[Client]()
    end = time.monotonic() + seconds

    def answered(index: int) -> None:
        nonlocal count
        count += 1
        if time.monotonic() < end:
            clients[index].transport.write(data)

    for index in range(connections):
        clients.append(await connect(target, partial(answered, index)))
    begin = time.monotonic()
    for client in clients:
        client.transport.write(data)
    await asyncio.sleep(seconds + 0.2)
    for client in clients:
        client.transport.abort()
    return {"requests_per_s": count / (end - begin)}


class Rate:
    """Requests to one target on a schedule, whatever the answers do."""

    def __init__(self, target: Target, rate: float = RATE) -> None:
        self.target, self.rate, self.data = target, rate, request(target)
        self.idle, self.latencies, self.lags = list[Client](), list[float](), list[float]()

    async def run(self, begin: float, seconds: float) -> None:
        for number in range(int(self.rate * seconds)):
            due_at = begin + number / self.rate
            await asyncio.sleep(max(0.0, due_at - time.monotonic()))
            client = self.idle.pop() if self.idle else await connect(self.target)
            sent_at = time.monotonic()
            self.lags.append(sent_at - due_at)
            client.on_end = partial(self.answered, client, sent_at)
            client.transport.write(self.data)

    def answered(self, client: Client, sent_at: float) -> None:
        self.latencies.append(time.monotonic() - sent_at)
        self.idle.append(client)

    def summary(self) -> dict[str, float]:
        latencies = self.latencies or [float("nan")]  # where nothing was answered
        return {
            "p50_ms": 1e3 * percentile(latencies, 50),
            "p99_ms": 1e3 * percentile(latencies, 99),
            "answered": len(self.latencies) / max(1, len(self.lags)),
            "generator_lag_p99_ms": 1e3 * percentile(self.lags or [float("nan")], 99),
        }


async def at_rate(target: Target, direct: Target, seconds: float) -> dict[str, float]:
    """Latency through a gateway, and of the same requests sent to the upstream itself in between: what else happens on
    the machine meets both alike."""
    through, beside = Rate(target), Rate(direct)
    begin = time.monotonic() + 0.2
    await asyncio.gather(through.run(begin, seconds), beside.run(begin + 0.5 / RATE, seconds))
    await asyncio.sleep(1.0)
    for client in through.idle + beside.idle:
        client.transport.abort()
    summary, other = through.summary(), beside.summary()
    added = {f"added_{name}": summary[name] - other[name] for name in ("p50_ms", "p99_ms")}
    return summary | {f"direct_{name}": other[name] for name in ("p50_ms", "p99_ms")} | added


@dataclass
class Streams:
    """Many streams at once, and when their chunks arrive."""

    target: Target
    count: int
    gap_s: float
    chunks: int
    gaps: list[float] = field(default_factory=list)  # between two chunks of a stream
    delays: list[float] = field(default_factory=list)  # from the time a chunk was due at the upstream
    clients: list[Client] = field(default_factory=list)
    completed: int = 0

    async def run(self, tick: Callable[[], None] = lambda: None) -> dict[str, float]:
        """`tick` is called every second."""
        lag = asyncio.create_task(_loop_lag(lags := list[float]()))
        data = request(self.target, stream=True, max_tokens=self.chunks, user=f"{self.gap_s:g}")
        for _ in range(self.count):
            await self._open(data)
            await asyncio.sleep(_NEXT_STREAM_S)
        end = time.monotonic() + self.gap_s * self.chunks + 20
        while self.completed < self.count and time.monotonic() < end:
            tick()
            await asyncio.sleep(1.0)
        lag.cancel()
        for client in self.clients:
            client.transport.abort()
        return self._summary(lags)

    async def _open(self, data: bytes) -> None:
        last = [0.0]

        def arrived(data: bytes) -> None:
            now = time.monotonic()
            for due in _DUE.findall(data):
                self.delays.append(now - float(due))
                if last[0]:
                    self.gaps.append(now - last[0])
                last[0] = now

        client = await connect(self.target, self._ended, arrived)
        self.clients.append(client)
        client.transport.write(data)

    def _ended(self) -> None:
        self.completed += 1

    def _summary(self, lags: list[float]) -> dict[str, float]:
        values = {"gap": self.gaps, "delay": self.delays, "generator_lag": lags}
        figures = {
            f"{name}_p{share}_ms": 1e3 * percentile(each or [float("nan")], share)
            for name, each in values.items()
            for share in (50, 99)
        }
        return figures | {"completed": self.completed / self.count}


async def _loop_lag(lags: list[float]) -> None:
    """How late this process wakes up: chunks that wait for it are not the gateway's fault."""
    while True:
        due_at = time.monotonic() + 0.01
        await asyncio.sleep(0.01)
        lags.append(time.monotonic() - due_at)
