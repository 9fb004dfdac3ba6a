"""The load of benchmarks/gateway.py: requests as fast as they are answered, at a fixed rate, and many streams at once.

Written on asyncio's protocols, because a client library would cost more than the gateway under test. It reports its own
lag: how late requests were sent compared with their schedule.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from armillary.stats import percentile

BODY = {
    "model": "bot",
    "messages": [{"role": "user", "content": "Say something about armillary spheres, and how to build one."}],
    "max_tokens": 16,
}
RATE, STREAMS, GAP_S = 200.0, 300, 0.05


class Client(asyncio.Protocol):
    """One connection; `on_bytes` is called with what arrives, `on_end` at the end of a response."""

    def __init__(self, on_end: Callable[[], None], on_bytes: Callable[[bytes], None] = lambda data: None) -> None:
        self.on_end, self.on_bytes, self.data = on_end, on_bytes, b""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.on_bytes(data)
        self.data += data
        end = self.data.find(b"\r\n\r\n")
        if end < 0:
            return
        head = self.data[:end].lower()
        at = head.find(b"content-length:")
        if at >= 0:
            done = len(self.data) >= end + 4 + int(head[at + 15 :].split(b"\r\n", 1)[0])
        else:
            done = self.data.endswith(b"0\r\n\r\n")
        if done:
            assert self.data.startswith(b"HTTP/1.1 200"), self.data[:300]
            self.data = b""
            self.on_end()


def request(port: int, key: str, **more: Any) -> bytes:
    body = json.dumps(BODY | more).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
    return (head + f"authorization: Bearer {key}\r\ncontent-length: {len(body)}\r\n\r\n").encode() + body


async def connect(port: int, on_end: Callable[[], None], on_bytes: Callable[[bytes], None] | None = None) -> Client:
    more = () if on_bytes is None else (on_bytes,)
    _, client = await asyncio.get_running_loop().create_connection(lambda: Client(on_end, *more), "127.0.0.1", port)
    return client


async def saturate(port: int, key: str, seconds: float, connections: int = 16) -> dict[str, float]:
    """Requests per second of as many connections that each send the next request when one is answered."""
    count, data, clients = 0, request(port, key), list[Client]()
    end = time.monotonic() + seconds

    def answered(index: int) -> None:
        nonlocal count
        count += 1
        if time.monotonic() < end:
            clients[index].transport.write(data)

    for index in range(connections):
        clients.append(await connect(port, lambda index=index: answered(index)))
    begin = time.monotonic()
    for client in clients:
        client.transport.write(data)
    await asyncio.sleep(seconds + 0.2)
    for client in clients:
        client.transport.abort()
    return {"requests_per_s": count / (end - begin)}


async def at_rate(port: int, key: str, seconds: float) -> dict[str, float]:
    """Latency of requests sent on a schedule, whatever the answers do."""
    idle, data, latencies, lags = list[Client](), request(port, key), list[float](), list[float]()

    def answered(client: Client, sent_at: float) -> None:
        latencies.append(time.monotonic() - sent_at)
        idle.append(client)

    begin = time.monotonic()
    for number in range(int(RATE * seconds)):
        due_at = begin + number / RATE
        await asyncio.sleep(max(0.0, due_at - time.monotonic()))
        client = idle.pop() if idle else await connect(port, lambda: None)
        lags.append(time.monotonic() - due_at)
        client.on_end = partial(answered, client, time.monotonic())
        client.transport.write(data)
    await asyncio.sleep(1.0)
    for client in idle:
        client.transport.abort()
    answered_count, latencies = len(latencies), latencies or [float("nan")]  # where nothing was answered
    return {
        "p50_ms": 1e3 * percentile(latencies, 50),
        "p99_ms": 1e3 * percentile(latencies, 99),
        "answered": answered_count / int(RATE * seconds),
        "generator_lag_p99_ms": 1e3 * percentile(lags, 99),
    }


async def streams(port: int, key: str, seconds: float) -> dict[str, float]:
    """Gaps between the chunks of many streams at once."""
    gaps, ended = list[float](), [0]
    data = request(port, key, stream=True, max_tokens=int(seconds / GAP_S))

    async def one() -> None:
        last = [0.0]

        def arrived(data: bytes) -> None:
            now = time.monotonic()
            if last[0] and b"tok" in data:
                gaps.append(now - last[0])
            last[0] = now

        client = await connect(port, lambda: ended.__setitem__(0, ended[0] + 1), arrived)
        client.transport.write(data)

    for _ in range(STREAMS):
        await one()
        await asyncio.sleep(0.002)
    end = time.monotonic() + seconds + 20
    while ended[0] < STREAMS and time.monotonic() < end:
        await asyncio.sleep(0.1)
    gaps = gaps or [float("nan")]
    return {
        "gap_p50_ms": 1e3 * percentile(gaps, 50),
        "gap_p99_ms": 1e3 * percentile(gaps, 99),
        "completed": ended[0] / STREAMS,
    }
