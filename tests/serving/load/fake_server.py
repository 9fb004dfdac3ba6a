"""A server that speaks OpenAI's streams with delays it is told, on loopback, in a thread of its own."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Fake:
    """What it does, and what it saw."""

    first_s: tuple[float, ...] = (0.02,)
    """delays before the first token, of one request after another, round and round"""
    gap_s: float = 0.002
    """between tokens"""
    slots: int = 10_000
    """requests worked on at once; others wait"""
    usage: bool = True
    """counts tokens where asked to"""
    refuses: tuple[str, ...] = ()
    """keys of a body that it answers with 400"""
    chat: bool = True
    """knows chat"""
    fails: tuple[int, ...] = ()
    """requests answered with 500 (the first is 0; trial requests count)"""
    cuts: tuple[int, ...] = ()
    """requests whose stream is cut"""
    tokens_per_chunk: int = 1
    """tokens in each event"""
    card: dict[str, Any] = field(default_factory=dict)
    """what it says of its model beside the name"""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    """what was asked"""
    arrived: list[float] = field(default_factory=list)
    """when, on time.monotonic"""
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def fake_server(**settings: Any) -> Iterator[Fake]:
    """Runs while the block does."""
    fake, ready = Fake(**settings), threading.Event()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=_serve, args=(loop, fake, ready), daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield fake
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)


def _serve(loop: asyncio.AbstractEventLoop, fake: Fake, ready: threading.Event) -> None:
    asyncio.set_event_loop(loop)
    slots = asyncio.Semaphore(fake.slots)
    server = loop.run_until_complete(
        asyncio.start_server(lambda r, w: _connection(fake, slots, r, w), "127.0.0.1", 0, backlog=1024)
    )
    fake.port = server.sockets[0].getsockname()[1]
    ready.set()
    loop.run_forever()
    server.close()
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
    loop.close()


async def _connection(
    fake: Fake, slots: asyncio.Semaphore, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    try:
        while await _request(fake, slots, reader, writer):
            pass
    except (ConnectionError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.close()


async def _request(
    fake: Fake, slots: asyncio.Semaphore, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> bool:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    verb, path, _ = head.split(" ", 2)
    sizes = [line.split(":")[1] for line in head.split("\r\n") if line.lower().startswith("content-length")]
    size = int(sizes[0]) if sizes else 0
    body = json.loads(await reader.readexactly(size)) if size else {}
    if verb == "GET":
        _whole(writer, 200, {"object": "list", "data": [{"id": "fake"} | fake.card]})
        return True
    number = len(fake.bodies)
    fake.bodies.append(body)
    fake.arrived.append(time.monotonic())
    refused = [key for key in fake.refuses if key in body]
    if number in fake.fails or refused or ("chat" in path and not fake.chat):
        status = 500 if number in fake.fails else 400 if refused else 404
        _whole(writer, status, {"error": {"message": f"no {refused[0]} here" if refused else "not now"}})
        return True
    async with slots:
        await _stream(fake, writer, body, number, "chat" in path)
    return number not in fake.cuts


def _whole(writer: asyncio.StreamWriter, status: int, body: Any) -> None:
    data = json.dumps(body).encode()
    head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)


async def _stream(fake: Fake, writer: asyncio.StreamWriter, body: dict[str, Any], number: int, chat: bool) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
    if chat:
        _event(writer, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    await asyncio.sleep(fake.first_s[number % len(fake.first_s)])
    pieces = -(-body["max_tokens"] // fake.tokens_per_chunk)
    for i in range(pieces):
        if i:
            await asyncio.sleep(fake.gap_s)
        if number in fake.cuts and i == 1:
            return
        _event(writer, {"choices": [{"index": 0, **({"delta": {"content": "a "}} if chat else {"text": "a "})}]})
        await writer.drain()
    _event(writer, {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
    if fake.usage and "stream_options" in body:
        words = body["messages"][0]["content"] if chat else body["prompt"]
        counts = {"prompt_tokens": len(words) // 4 + 5, "completion_tokens": body["max_tokens"]}
        _event(writer, {"choices": [], "usage": counts})
    _chunk(writer, b"data: [DONE]\n\n")
    writer.write(b"0\r\n\r\n")
    await writer.drain()


def _event(writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
    _chunk(writer, b"data: " + json.dumps(event).encode() + b"\n\n")


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
