"""Bodies of requests: bounded in size and time each, and in size all together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import Request

_TOGETHER = 16
"""bodies of the largest size that may be here at once"""


class TooLarge(Exception):
    """A body beyond the limit."""


class TooSlow(Exception):
    """A body that does not come to its end."""


class TooMany(Exception):
    """Bodies beyond what may be here at once."""


class Bodies:
    """All that are here."""

    def __init__(self, most: int, limit_s: float) -> None:
        self._most, self._limit_s = most, limit_s
        self._left = _TOGETHER * most

    @asynccontextmanager
    async def whole(self, request: Request) -> AsyncIterator[bytes]:
        """The body of a request; its room is free again at the end of the block."""
        parts: list[bytes] = []
        try:
            try:
                async with asyncio.timeout(self._limit_s):
                    await self._read(request, parts)
            except TimeoutError:
                raise TooSlow from None
            yield b"".join(parts)
        finally:
            self._left += sum(map(len, parts))

    async def _read(self, request: Request, parts: list[bytes]) -> None:
        size = 0
        async for part in request.stream():
            size += len(part)
            parts.append(part)
            self._left -= len(part)
            if size > self._most:
                raise TooLarge
            if self._left < 0:
                raise TooMany
