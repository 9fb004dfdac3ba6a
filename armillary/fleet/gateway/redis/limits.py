"""The same sliding windows in Redis, exact across any number of gateways: one Lua script per request.

A window is a sorted set of request ids by time and a hash with their costs and the sum. Redis' own clock is used, so
the clocks of gateways do not matter. A script that is sent twice, because the connection broke before its answer,
counts once. A budget has only the hash, of a day or month; a request leaves it when it is corrected.
For limits that survive a restart of Redis, run it with `appendonly yes` and `appendfsync always`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from armillary.errors import missing
from armillary.fleet.gateway.limits import Charge, Refusal

RESERVE = """
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local request = ARGV[1]
local function charge(i)
  local from = 4 * i - 2
  return KEYS[2 * i - 1], KEYS[2 * i], tonumber(ARGV[from]), tonumber(ARGV[from + 1]), tonumber(ARGV[from + 2]),
    tonumber(ARGV[from + 3])
end
local function wait(set, costs, needed, window)
  local from = 0
  while true do
    local entries = redis.call('ZRANGE', set, from, from + 99, 'WITHSCORES')
    if #entries == 0 then return window end
    for j = 1, #entries, 2 do
      needed = needed - (redis.call('HGET', costs, entries[j]) or 0)
      if needed <= 0 then return math.max(0, tonumber(entries[j + 1]) + window - now) end
    end
    from = from + 100
  end
end
for i = 1, #KEYS / 2 do
  local set, costs, cost, limit, window, ends = charge(i)
  if redis.call('HEXISTS', costs, request) == 1 then return {0, 0} end
  if ends == 0 then
    local gone = redis.call('ZRANGEBYSCORE', set, '-inf', now - window)
    for _, id in ipairs(gone) do
      redis.call('HINCRBY', costs, '', -(redis.call('HGET', costs, id) or 0))
      redis.call('HDEL', costs, id)
    end
    if #gone > 0 then redis.call('ZREMRANGEBYSCORE', set, '-inf', now - window) end
  end
  local needed = (tonumber(redis.call('HGET', costs, '')) or 0) + cost - limit
  if needed > 0 then
    if ends > 0 then return {i, math.max(0, ends * 1000000 - now)} end
    return {i, wait(set, costs, needed, window)}
  end
end
for i = 1, #KEYS / 2 do
  local set, costs, cost, limit, window, ends = charge(i)
  redis.call('HSET', costs, request, cost)
  redis.call('HINCRBY', costs, '', cost)
  if ends > 0 then
    redis.call('EXPIREAT', costs, math.ceil(ends) + 86400)
  else
    redis.call('ZADD', set, now, request)
    local life = math.ceil(window / 1000) + 60000
    redis.call('PEXPIRE', set, life)
    redis.call('PEXPIRE', costs, life)
  end
end
return {0, 0}
"""
CORRECT = """
for i = 1, #KEYS do
  local before = redis.call('HGET', KEYS[i], ARGV[1])
  if before then
    local cost = math.min(tonumber(ARGV[2 * i]), tonumber(before))
    redis.call('HINCRBY', KEYS[i], '', cost - before)
    if ARGV[2 * i + 1] == '1' then
      redis.call('HDEL', KEYS[i], ARGV[1])
    else
      redis.call('HSET', KEYS[i], ARGV[1], cost)
    end
  end
end
return 0
"""
_PREFIX = "armillary:limit:"
_RETRY_S = 3.0
"""how long a request waits for Redis to come back, before the documented failure behaviour"""
_TIMEOUT_S = 1.0
_DOWN_S = 1.0
"""after a failure, requests do not wait for Redis for this long"""


def redis_errors() -> tuple[type[Exception], ...]:
    """What its client raises where Redis does not answer; RuntimeError is uvloop's, for a write to a connection that
    Redis has closed a moment before."""
    from redis.exceptions import RedisError

    return (RedisError, OSError, TimeoutError, RuntimeError)


class LimiterUnavailable(Exception):
    """Redis does not answer."""


class RedisLimiter:
    """Windows in Redis."""

    def __init__(self, url: str, say: Callable[[str], None], *, retry_s: float = _RETRY_S) -> None:
        try:
            from redis.asyncio import Redis
        except ImportError:
            raise missing("redis", "limits shared by several gateways", "gateway") from None
        self._redis: Any = Redis.from_url(url, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S)
        self._reserve, self._correct = self._redis.register_script(RESERVE), self._redis.register_script(CORRECT)
        self._say, self._retry_s = say, retry_s
        self._down_since: float | None = None
        self._probe_at = 0.0

    async def reserve(self, request: str, charges: Sequence[Charge]) -> Refusal | None:
        keys = [key for charge in charges for key in (_set(charge), _costs(charge))]
        numbers = [n for c in charges for n in (c.cost, c.limit, int(c.window_s * 1e6), int(c.ends_at or 0))]
        index, wait_us = await self._call(self._reserve, keys, [request, *numbers])
        return Refusal(charges[int(index) - 1], int(wait_us) / 1e6) if index else None

    async def correct(self, request: str, charges: Sequence[Charge], costs: Sequence[int]) -> None:
        numbers = [
            n for charge, cost in zip(charges, costs, strict=True) for n in (cost, int(charge.ends_at is not None))
        ]
        await self._call(self._correct, [_costs(charge) for charge in charges], [request, *numbers])

    async def close(self) -> None:
        await self._redis.aclose()

    async def _call(self, script: Any, keys: list[str], arguments: list[Any]) -> Any:
        """The script's answer, retried for a moment; both scripts give the same result when they run twice."""
        deadline = time.monotonic() + self._retry_s
        if self._down_since is not None and time.monotonic() < self._probe_at:
            raise LimiterUnavailable
        while True:
            try:
                answer = await script(keys=keys, args=arguments)
            except redis_errors() as error:
                if time.monotonic() > deadline:
                    self._failed(error)
                    raise LimiterUnavailable from None
                await asyncio.sleep(0.05)
                continue
            self._worked()
            return answer

    def _failed(self, error: BaseException) -> None:
        now = time.monotonic()
        self._probe_at = now + _DOWN_S
        if self._down_since is None:
            self._down_since = now
            self._say(f"Redis does not answer ({type(error).__name__}); limits are not counted until it does")

    def _worked(self) -> None:
        if self._down_since is not None:
            self._say(f"Redis answers again after {time.monotonic() - self._down_since:.0f} s")
            self._down_since = None


def _set(charge: Charge) -> str:
    return f"{_PREFIX}{{{charge.bucket}}}:times"


def _costs(charge: Charge) -> str:
    return f"{_PREFIX}{{{charge.bucket}}}:costs"
