"""Health checks of replicas: each is asked every second, and leaves the rotation after two failures in a row.

A deep check says whether the engine works, not only whether the port answers: `/ready` of this project's server, or a
completion of one token where a server has no such path.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

import msgspec

from armillary.fleet.gateway.breaker import FAILED_PROBES
from armillary.fleet.gateway.gateway_config import GatewaySettings, ModelSettings
from armillary.fleet.gateway.model_routers import Link, Models
from armillary.fleet.gateway.routing import Replica
from armillary.fleet.gateway.upstream import UpstreamError

_NO_READY = tuple(f"it answered {status}" for status in (401, 403, 404, 405))
_NOT_SERVED = tuple(f"it answered {status}" for status in (400, 404, 405, 422, 429))
"""answers of a server that works, but not on this path or not now"""
_COMPLETION_EVERY = 2
"""of health checks, where a check costs the replica a token"""
_NOTICED_S = 0.25
"""time until a replica that was added is checked"""
_SILENT = "it did not answer within"
_STREAM_TOKENS, _FIRST_CHUNK_S = 8, 5.0
"""of a stream that shows how fast a replica is: its length, and the time that its first chunk may take"""
_JSON = ((b"content-type", b"application/json"),)


class HealthChecker:
    """Checks every replica until cancelled."""

    def __init__(self, models: Models, settings: GatewaySettings, say: Callable[[str], None]) -> None:
        self._models, self._settings, self._say = models, settings, say
        self._has_ready: dict[Replica, bool] = {}
        self._out: set[Replica] = set()  # of which the log says that they get no requests

    async def run(self) -> None:
        """Replicas may come and go."""
        watched: dict[Replica, asyncio.Task[None]] = {}
        try:
            while True:
                present = {replica: model for model, replica in self._checked()}
                for replica in watched.keys() - present.keys():
                    watched.pop(replica).cancel()
                    self._has_ready.pop(replica, None)
                    self._out.discard(replica)
                for replica in present.keys() - watched.keys():
                    watched[replica] = asyncio.create_task(self._watch(present[replica], replica))
                await asyncio.sleep(_NOTICED_S)
        finally:
            for task in watched.values():
                task.cancel()

    async def first_round(self) -> None:
        """Check all replicas once, before the first request: one that fails gets none until a check passes."""
        await asyncio.gather(*(self._first(model, replica) for model, replica in self._checked()))

    async def _first(self, model: ModelSettings, replica: Replica) -> None:
        replica.breaker.failed_probes = FAILED_PROBES - 1
        await self.check(model, replica)

    def _checked(self) -> list[tuple[ModelSettings, Replica]]:
        return [(model, replica) for model, replica in self._models.replicas() if model.probe != "none"]

    async def _watch(self, model: ModelSettings, replica: Replica) -> None:
        """A check that failed is repeated without a pause of its own, so that a replica that hangs is out within an
        interval (two, where a check costs a token) and twice the timeout."""
        pause_s = self._settings.health_interval_s
        while True:
            is_rare = self._is_completion(model, replica) and replica.breaker.retry_at is None
            await asyncio.sleep(pause_s * (_COMPLETION_EVERY if is_rare else 1))
            begin = time.monotonic()
            while not await self.check(model, replica) and replica.breaker.retry_at is None:
                await asyncio.sleep(max(0.0, begin + pause_s - time.monotonic()))

    async def check(self, model: ModelSettings, replica: Replica) -> bool:
        """One check, and what follows from it."""
        begin, pool = time.monotonic(), replica.link.pool
        reason = await self._problem(model, replica)
        is_silent = reason is not None and reason.startswith(_SILENT)
        if is_silent and pool.heard_at > begin:
            reason = None  # busy with other requests, whose tokens arrive
        if reason is None:
            replica.breaker.probe_passed(time.monotonic())
        else:
            replica.breaker.probe_failed(time.monotonic())
        is_out = replica.breaker.retry_at is not None
        if is_out != (replica in self._out) and not replica.drained:
            self._say_state(replica, is_out, reason or "requests to it fail")
        if is_out and is_silent:
            pool.fail_unanswered("its health checks are not answered")
        return reason is None

    def _say_state(self, replica: Replica, is_out: bool, reason: str) -> None:
        """Once each time, whether checks or requests have found out."""
        url = replica.link.settings.url
        if is_out:
            self._out.add(replica)
            self._say(f"{url} gets no requests: {reason}")
        else:
            self._out.discard(replica)
            self._say(f"{url} gets requests")

    def _is_completion(self, model: ModelSettings, replica: Replica) -> bool:
        return model.probe == "completion" or (model.probe == "auto" and not self._has_ready.get(replica, True))

    async def _problem(self, model: ModelSettings, replica: Replica) -> str | None:
        """Why a replica is not healthy."""
        if self._is_completion(model, replica):
            reason = await self._ask(replica.link, "POST", "/v1/completions", _one_token(model, replica.link))
            return None if reason in _NOT_SERVED else reason
        path = "/v1/models" if model.probe == "models" else "/ready"
        reason = await self._ask(replica.link, "GET", path)
        if model.probe == "auto" and reason in _NO_READY:
            self._has_ready[replica] = False
            return await self._problem(model, replica)
        return reason

    async def _ask(self, link: Link, method: str, path: str, body: bytes = b"") -> str | None:
        """None where the answer is 200."""
        headers = [*_JSON, (b"content-length", str(len(body)).encode())]
        try:
            async with asyncio.timeout(self._settings.health_timeout_s):
                connection = await link.pool.connect_new()
                try:
                    connection.send(link.head(method, path, headers) + body)
                    status = await connection.head(
                        2 * self._settings.health_timeout_s
                    )  # the block's own time ends before
                finally:
                    connection.abort()
        except UpstreamError as error:
            return str(error)
        except TimeoutError:
            return f"{_SILENT} {self._settings.health_timeout_s:g} s"
        return None if status == 200 else f"it answered {status}"


def _one_token(model: ModelSettings, link: Link, **more: object) -> bytes:
    name = link.settings.model or model.name
    return bytes(msgspec.json.encode({"model": name, "prompt": "1", "max_tokens": 1, "temperature": 0, **more}))


async def stream_gap_s(model: ModelSettings, link: Link, limit_s: float) -> float | None:
    """Mean time between chunks of a stream of a few tokens; infinite where it fails or takes more than `limit_s` per
    chunk, None where the replica cannot be asked for one or answers in one piece."""
    body = _one_token(model, link, max_tokens=_STREAM_TOKENS, stream=True)
    head = link.head("POST", "/v1/completions", [*_JSON, (b"content-length", str(len(body)).encode())])
    most_s, times, loop = _STREAM_TOKENS * limit_s, list[float](), asyncio.get_running_loop()
    try:
        async with asyncio.timeout(_FIRST_CHUNK_S) as ends:
            connection = await link.pool.connect_new()
            try:
                connection.send(head + body)
                status = await connection.head(math.inf)  # the block's own time ends it
                while status == 200 and len(times) <= _STREAM_TOKENS and await connection.read(math.inf):
                    times.append(time.monotonic())
                    if len(times) == 1:
                        ends.reschedule(loop.time() + most_s)
            finally:
                connection.abort()
    except (UpstreamError, TimeoutError):
        return math.inf
    if status != 200:
        return None if f"it answered {status}" in (*_NOT_SERVED, *_NO_READY) else math.inf
    return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None
