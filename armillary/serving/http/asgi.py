"""One HTTP request and its response over ASGI: a bounded body, JSON, and server-sent events."""

from collections.abc import Awaitable, Callable
from typing import Any

from msgspec.json import encode

from armillary.serving.http.body_limits import BodyLimits, BodyTimeout, BodyTooLarge, Receive, TooManyBodies
from armillary.serving.http.problem import Problem

Send = Callable[[dict[str, Any]], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]
JSON = (b"content-type", b"application/json")


class AsgiConnection:
    """A request, and where its response goes; `status` is the response's, 0 before it has begun."""

    def __init__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers = {name.lower(): value for name, value in scope["headers"]}
        self.status = 0
        self._receive = receive
        self._send = send

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
        await self._send({"type": "http.response.start", "status": status, "headers": [kind, size, *(headers or ())]})
        await self._send({"type": "http.response.body", "body": b"" if self.method == "HEAD" else body})

    async def json(self, status: int, table: Any, headers: Headers | None = None) -> None:
        await self.respond(status, encode(table), headers=headers)

    async def problem(self, problem: Problem) -> None:
        """Send an error; where the response has begun, as its last event."""
        if not self.status:
            close = [(b"connection", b"close")] if problem.code is None and problem.status in (408, 413) else []
            return await self.json(problem.status, problem.body, [*problem.headers, *close])
        await self.event(b"data: " + encode(problem.body) + b"\n\n")
        return await self.end_events()

    async def begin_events(self) -> None:
        """Send the head of a streamed response."""
        self.status = 200
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def event(self, data: bytes) -> None:
        """Send one or several complete events."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end_events(self, data: bytes = b"") -> None:
        await self._send({"type": "http.response.body", "body": data})
