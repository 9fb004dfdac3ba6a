"""Copies of requests for shadows: replicas of a release that is tried with real traffic before any client sees it.

A copy never makes a client wait: it is sent beside the request, bounded in number, and its answer is read and thrown
away. What is kept is whether it failed, and its latencies.
"""

from __future__ import annotations

import asyncio
import time

from armillary.fleet.gateway.gateway_config import GatewaySettings
from armillary.fleet.gateway.routing import Replica
from armillary.fleet.gateway.token_usage import TokenUsage, UsageReader
from armillary.fleet.gateway.upstream import UpstreamConnection, UpstreamError

_MOST = 256
"""copies in flight; more are left out, so that a shadow that hangs costs no more memory than this"""
_BUSY = (429, 503)


class Mirror:
    """Sends copies."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self._tasks: set[asyncio.Task[None]] = set()
        self.left_out = 0

    def send(self, shadow: Replica, request: bytes, *, stream: bool) -> None:
        """Send a copy, if there are not too many."""
        if len(self._tasks) >= _MOST:
            self.left_out += 1
            shadow.requests -= 1
            return
        task = asyncio.create_task(self._sent(shadow, request, stream))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _sent(self, shadow: Replica, request: bytes, stream: bool) -> None:
        shadow.in_flight += 1
        trial, upstream = shadow.breaker.begin(), None
        try:
            upstream = await shadow.link.pool.connect_new()
            upstream.send(request)
            await self._read(shadow, upstream, stream)
        except UpstreamError:
            shadow.failures += 1
            shadow.breaker.failed(time.monotonic())
        finally:
            shadow.in_flight -= 1
            if trial:
                shadow.breaker.trial_ended()
            if upstream is not None:
                upstream.abort()

    async def _read(self, shadow: Replica, upstream: UpstreamConnection, stream: bool) -> None:
        begin, settings = time.monotonic(), self._settings
        status = await upstream.head(settings.first_token_timeout_s)
        if status in _BUSY:
            shadow.requests -= 1  # neither an answer nor a failure
            return
        if status >= 500:
            raise UpstreamError(f"it answered {status}")
        reader, data = UsageReader(stream=stream, hidden=False), await upstream.read(settings.first_token_timeout_s)
        first = time.monotonic()
        while data:
            reader.feed(data)
            data = await upstream.read(settings.idle_timeout_s)
        reader.rest()
        shadow.breaker.succeeded()
        if status == 200:
            answered(shadow, begin=begin, first=first, usage=reader.usage(), stream=stream)


def answered(replica: Replica, *, begin: float, first: float, usage: TokenUsage | None, stream: bool) -> None:
    """Note the latencies of an answer that has just ended."""
    replica.ttft.add(first - begin)
    if stream and usage is not None and usage.completion > 1:
        replica.tpot.add((time.monotonic() - first) / (usage.completion - 1))
