"""One HTTP request and its response over ASGI: JSON, server-sent events, and a body within limits: size and time of a
body, and the bytes of all bodies together."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from msgspec.json import encode

from armillary.serving.http.problem import Problem

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]
JSON = (b"content-type", b"application/json")
_EVENTS = b"text/event-stream"
_NAMED_EVENTS = ("/v1/messages", "/v1/responses")
"""APIs whose events and errors have a type, without which their clients pass over them"""
_ONCE = (b"authorization", b"x-api-key", b"host", b"content-type", b"content-length", b"transfer-encoding")
_DRAIN = 16
"""a body over the limit is read and dropped up to this many times the limit: a client that still writes reads no
response"""


class BodyTooLarge(Exception):
    """A body over the size limit."""


class BodyTimeout(Exception):
    """A body that did not arrive in time."""


class TooManyBodies(Exception):
    """All bodies together are over their limit."""


class ClientDisconnected(Exception):
    """The client closed the connection."""


class BodyLimits:
    """Reads the bodies of one server within its limits."""

    def __init__(self, *, limit: int, total: int, timeout_s: float) -> None:
        self.limit, self.timeout_s = limit, timeout_s
        self._left = total

    @asynccontextmanager
    async def read(self, receive: Receive) -> AsyncIterator[bytes]:
        """The body of a request; its bytes count until the end of the block."""
        parts: list[bytes] = []
        try:
            try:
                async with asyncio.timeout(self.timeout_s):
                    await self._read(receive, parts)
            except TimeoutError:
                raise BodyTimeout from None
            yield b"".join(parts)
        finally:
            self._left += sum(map(len, parts))

    async def _read(self, receive: Receive, parts: list[bytes]) -> None:
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnected
            part = message.get("body", b"")
            size += len(part)
            if size <= self.limit:
                parts.append(part)
                self._left -= len(part)
                if self._left < 0:
                    raise TooManyBodies
            if not message.get("more_body") or size > self.limit * _DRAIN:
                break
        if size > self.limit:
            raise BodyTooLarge


class AsgiConnection:
    """A request, and where its response goes; `status` is the response's, 0 before it has begun."""

    def __init__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers = {name.lower(): value for name, value in scope["headers"]}
        self._scope = scope
        self.status = 0
        self.extra_headers: Headers = []  # of every complete response
        self._is_stream = False
        self._receive = receive
        self._send = send

    def refuse_repeated_headers(self) -> None:
        """Problem 400 where a header that decides who asks, or for what, is there twice: a proxy in front may have read
        the other one."""
        if len(self.headers) == len(self._scope["headers"]):
            return
        names = [name.lower() for name, _ in self._scope["headers"]]
        twice = next((name for name in _ONCE if names.count(name) > 1), None)
        if twice is not None:
            raise Problem(400, f"the header {twice.decode()} is there twice; send it once")

    async def body(self, limits: BodyLimits) -> bytes:
        """The complete body; Problem where it is too large or too slow."""
        try:
            async with limits.read(self._receive) as body:
                return body
        except BodyTimeout:
            raise Problem(408, f"the body did not arrive within {limits.timeout_s:.0f} s; send it again") from None
        except BodyTooLarge:
            raise Problem(
                413, f"the body has more than {limits.limit:,} bytes; shorten it or raise serve.max_body_bytes"
            ) from None
        except TooManyBodies:
            raise Problem(
                429, "too many bodies are in flight; try again later", code="rate_limit_exceeded", retry_after_s=2
            ) from None

    async def disconnected(self) -> None:
        """Return when the client has closed the connection."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def respond(
        self, status: int, body: bytes, kind: tuple[bytes, bytes] = JSON, headers: Headers | None = None
    ) -> None:
        """Send a complete response."""
        self.status = status
        size = (b"content-length", str(len(body)).encode())
        await self._send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [kind, size, *(headers or ()), *self.extra_headers],
            }
        )
        await self._send({"type": "http.response.body", "body": b"" if self.method == "HEAD" else body})

    async def json(self, status: int, table: Any, headers: Headers | None = None) -> None:
        await self.respond(status, encode(table), headers=headers)

    async def problem(self, problem: Problem) -> None:
        """Send an error; where a stream has begun, as its last event. Half of a complete response cannot be told from a
        whole one by more text, so there the server closes the connection."""
        if not self.status:
            close = [(b"connection", b"close")] if problem.code is None and problem.status in (408, 413) else []
            return await self.json(problem.status, self._error(problem), [*problem.headers, *close])
        if not self._is_stream:
            return None
        name = b"event: error\n" if self._names_events else b""
        await self.event(name + b"data: " + encode(self._error(problem)) + b"\n\n")
        return await self.end_events()

    def _error(self, problem: Problem) -> dict[str, Any]:
        return {"type": "error", **problem.body} if self._names_events else problem.body

    @property
    def _names_events(self) -> bool:
        return self.path.startswith(_NAMED_EVENTS)

    async def begin(self, status: int, headers: Headers) -> None:
        """Send the head of a response whose body follows in parts."""
        self.status = status
        self._is_stream = any(name == b"content-type" and value.startswith(_EVENTS) for name, value in headers)
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def begin_events(self) -> None:
        """Send the head of a stream of events."""
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        await self.begin(200, headers)

    async def event(self, data: bytes) -> None:
        """Send one or several complete events."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end_events(self, data: bytes = b"") -> None:
        await self._send({"type": "http.response.body", "body": data})
