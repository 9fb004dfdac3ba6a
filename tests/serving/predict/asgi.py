"""Calls an ASGI application in the loop of the test, with its start-up and shutdown."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Reply:
    code: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Client:
    def __init__(self, app: Any) -> None:
        self.app = app

    async def get(self, path: str) -> Reply:
        return await self.send("GET", path, b"")

    async def post(self, path: str, body: Any) -> Reply:
        return await self.send("POST", path, body if isinstance(body, bytes) else json.dumps(body).encode())

    async def send(
        self,
        method: str,
        path: str,
        body: bytes,
        *,
        endless: bool = False,
        rest: Awaitable[bytes] | None = None,
        headers: dict[str, str] | None = None,
    ) -> Reply:
        """`endless`: more of the body is promised, and never comes; `rest`: it comes when that is there."""
        parts = [{"type": "http.request", "body": body, "more_body": endless or rest is not None}]
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            if not parts and endless:
                await asyncio.Event().wait()
            if not parts and rest is not None:
                return {"type": "http.request", "body": await rest, "more_body": False}
            return parts.pop(0) if parts else {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        pairs = [(name.encode(), value.encode()) for name, value in ({"host": "test"} | (headers or {})).items()]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": pairs,
            "scheme": "http",
            "server": ("test", 80),
            "client": ("test", 1),
            "root_path": "",
        }
        await self.app(scope, receive, send)
        found = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
        body = b"".join(message.get("body", b"") for message in sent[1:])
        return Reply(sent[0]["status"], found, body)


@asynccontextmanager
async def running(app: Any) -> AsyncIterator[Client]:
    """`app` from its start-up to its shutdown."""
    inbox: asyncio.Queue[dict[str, str]] = asyncio.Queue()
    outbox: asyncio.Queue[dict[str, str]] = asyncio.Queue()
    life = asyncio.create_task(app({"type": "lifespan", "asgi": {"version": "3.0"}}, inbox.get, outbox.put))
    await inbox.put({"type": "lifespan.startup"})
    told = await outbox.get()
    assert told["type"] == "lifespan.startup.complete", told
    try:
        yield Client(app)
    finally:
        await inbox.put({"type": "lifespan.shutdown"})
        assert (await asyncio.wait_for(outbox.get(), 20))["type"] == "lifespan.shutdown.complete"
        await life
