"""Kept responses in Redis, shared by several gateways; Redis ends them, and its `maxmemory` bounds them.

While Redis does not answer, nothing is kept and nothing fails: requests go to replicas.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec

from armillary.errors import missing
from armillary.fleet.gateway.redis.limits import redis_errors
from armillary.fleet.gateway.response_cache import CachedResponse

_PREFIX = b"armillary:response:"
_TIMEOUT_S = 0.25
_DOWN_S = 2.0
"""after a failure, requests do not ask Redis for this long"""


class RedisCache:
    """Responses by their keys, which are hashes of client and request."""

    def __init__(self, url: str, clock: Callable[[], float] = time.monotonic) -> None:
        try:
            from redis.asyncio import Redis
        except ImportError:
            raise missing("redis", "responses shared by several gateways", "gateway") from None
        self._redis: Any = Redis.from_url(url, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S)
        self._clock, self._down_until = clock, 0.0
        self.hits = self.misses = 0

    async def get(self, key: bytes) -> CachedResponse | None:
        data = await self._ask(lambda: self._redis.get(_PREFIX + key))
        response = _decoded(data) if data else None
        self.hits, self.misses = self.hits + (response is not None), self.misses + (response is None)
        return response

    async def put(self, key: bytes, response: CachedResponse, ttl_s: float) -> None:
        data = msgspec.msgpack.encode((response.content_type, response.parts, response.stream))
        await self._ask(lambda: self._redis.set(_PREFIX + key, data, px=max(1, int(ttl_s * 1000))))

    async def close(self) -> None:
        await self._redis.aclose()

    async def _ask(self, command: Callable[[], Any]) -> Any:
        if self._clock() < self._down_until:
            return None
        try:
            return await command()
        except redis_errors():
            self._down_until = self._clock() + _DOWN_S
            return None


def _decoded(data: bytes) -> CachedResponse | None:
    """None for an entry that another version has written."""
    try:
        kind, parts, stream = msgspec.msgpack.decode(data, type=tuple[bytes, tuple[bytes, ...], bool])
    except (msgspec.DecodeError, msgspec.ValidationError):
        return None
    return CachedResponse(kind, parts, stream)
