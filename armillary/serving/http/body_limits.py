"""Limits of request bodies: size and time of each body, and the bytes of all bodies together."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

Receive = Callable[[], Awaitable[dict[str, Any]]]
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
