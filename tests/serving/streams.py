"""Raw streams, as many as wanted from one event loop: what a client sees, byte for byte."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

from tests.serving.tiny import Server


@dataclass
class Streamed:
    """What came of a request."""

    status: int = 0
    events: list[Any] = field(default_factory=list)
    done: bool = False
    """[DONE] came"""

    @property
    def text(self) -> str:
        choices = [choice for event in self.events for choice in event.get("choices", ())]
        return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)

    @property
    def error(self) -> Any:
        return next((event["error"] for event in self.events if "error" in event), None)


def request_bytes(path: str, body: Any) -> bytes:
    """A request as it goes over the wire."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data


async def stream(
    server: Server,
    body: Any,
    path: str = "/v1/completions",
    *,
    events: int | None = None,
    begun: asyncio.Event | None = None,
    timeout_s: float = 90.0,
) -> Streamed:
    """Read a stream to its end, or leave after so many events; `begun` is set when the first came."""
    reader, writer = await asyncio.open_connection(*server.address)
    found = Streamed()
    try:
        writer.write(request_bytes(path, body))
        async with asyncio.timeout(timeout_s):
            await _read(reader, found, events, begun)
    finally:
        writer.transport.abort()
    return found


async def _read(reader: asyncio.StreamReader, found: Streamed, events: int | None, begun: asyncio.Event | None) -> None:
    found.status = int((await reader.readline()).split()[1])
    chunked = length = 0
    while (line := await reader.readline()).strip():
        chunked |= b"chunked" in line
        length = int(line.split(b":")[1]) if line.lower().startswith(b"content-length") else length
    if not chunked:
        found.events.append(json.loads(await reader.readexactly(length)))
        return
    while size := int((await reader.readline()).strip() or b"0", 16):
        data = (await reader.readexactly(size + 2))[:-2].decode()
        if begun is not None:
            begun.set()
        for line in data.split("\n\n"):
            if line == "data: [DONE]":
                found.done = True
            elif line:
                found.events.append(json.loads(line.removeprefix("data: ")))
        if events is not None and len(found.events) >= events:
            return
