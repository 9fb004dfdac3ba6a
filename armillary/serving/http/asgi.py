"""One HTTP request and its answer, over ASGI: a body that is bounded in size and time, JSON, and server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from msgspec.json import encode

from armillary.serving.http.problem import Problem

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
_BODY_S = 30.0
"""a body that takes longer to come is not waited for"""
_DRAIN = 16
"""bodies beyond the limit are read and dropped up to so many times it: a client that still writes reads no answer"""
JSON = (b"content-type", b"application/json")


class ClientGone(Exception):
    """Nobody is there to answer to."""


class Budget:
    """Bytes of bodies that may be on their way at once, of all requests together."""

    def __init__(self, most: int) -> None:
        self._left = most

    def take(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise Problem(
                429, "too many bodies are on their way; try again later", code="rate_limit_exceeded", retry_after_s=2
            )

    def give_back(self, size: int) -> None:
        self._left += size


class Exchange:
    """What is asked, and where the answer goes."""

    def __init__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers = {name.lower(): value for name, value in scope["headers"]}
        self.status = 0
        """of the answer, once it has begun"""
        self._receive = receive
        self._send = send

    async def body(self, limit: int, budget: Budget) -> bytes:
        """The whole body; Problem where it is too large or too slow."""
        parts: list[bytes] = []
        try:
            async with asyncio.timeout(_BODY_S):  # no task of its own: most bodies are there already
                size = await self._read(limit, budget, parts)
        except TimeoutError:
            raise Problem(408, f"the body did not come within {_BODY_S:.0f} s; send it again") from None
        finally:
            budget.give_back(sum(map(len, parts)))
        if size > limit:
            raise Problem(413, f"the body has more than {limit:,} bytes; shorten it or raise serve.max_body_bytes")
        return b"".join(parts)

    async def _read(self, limit: int, budget: Budget, parts: list[bytes]) -> int:
        """Its size; what is beyond the limit is not kept."""
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part = message.get("body", b"")
            size += len(part)
            if size <= limit:
                parts.append(part)
                budget.take(len(part))
            if not message.get("more_body") or size > limit * _DRAIN:
                return size

    async def gone(self) -> None:
        """Returns when the client has hung up."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def answer(
        self,
        status: int,
        body: bytes,
        kind: tuple[bytes, bytes] = JSON,
        headers: list[tuple[bytes, bytes]] | None = None,
    ) -> None:
        """A whole answer."""
        self.status = status
        size = (b"content-length", str(len(body)).encode())
        await self._send({"type": "http.response.start", "status": status, "headers": [kind, size, *(headers or ())]})
        await self._send({"type": "http.response.body", "body": b"" if self.method == "HEAD" else body})

    async def json(self, status: int, table: Any, headers: list[tuple[bytes, bytes]] | None = None) -> None:
        await self.answer(status, encode(table), headers=headers)

    async def problem(self, problem: Problem) -> None:
        """An error; where the answer has begun, as its last event."""
        if not self.status:
            close = [(b"connection", b"close")] if problem.code is None and problem.status in (408, 413) else []
            return await self.json(problem.status, problem.body, [*problem.headers, *close])
        await self.event(b"data: " + encode(problem.body) + b"\n\n")
        return await self.end_events()

    async def begin_events(self) -> None:
        """The head of an answer that comes piece by piece."""
        self.status = 200
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def event(self, data: bytes) -> None:
        """One piece, or several that are there."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end_events(self, data: bytes = b"") -> None:
        await self._send({"type": "http.response.body", "body": data})
