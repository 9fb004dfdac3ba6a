"""Sends a request to a replica, and its response to the client part by part.

Before the first byte of a response another replica may be tried; after it, an error ends the stream with an event that
says so. A client that leaves ends the request at the replica too.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from armillary.fleet.gateway.body import RequestBody, forwarded
from armillary.fleet.gateway.gateway_config import GatewaySettings
from armillary.fleet.gateway.keys import ApiKey
from armillary.fleet.gateway.model_guards import ModelGuards
from armillary.fleet.gateway.model_routers import Link, Models
from armillary.fleet.gateway.response_cache import CachedResponse, ResponseRecorder
from armillary.fleet.gateway.routing import Replica, Router
from armillary.fleet.gateway.shadow.mirror import Mirror, answered
from armillary.fleet.gateway.token_usage import TokenUsage, UsageReader
from armillary.fleet.gateway.upstream import EVENT_STREAM, UpstreamConnection, UpstreamError
from armillary.serving.http.asgi import AsgiConnection, ClientDisconnected, Headers
from armillary.serving.http.problem import Problem

_BUSY, _FAILED, _REFUSED = (429, 503), (500, 502, 504), (401, 403)
_TO_REPLICA = (b"accept", b"user-agent", b"traceparent", b"tracestate", b"openai-beta", b"anthropic-version")
_TO_CLIENT = (b"content-type", b"cache-control", b"retry-after")
_WATCH_AFTER_S = 0.02
"""a request that takes longer gets a task that notices when its client leaves, which costs more than a short one"""
_MOST_CHECKED = 10_000_000
"""bytes of a complete answer that guards check"""


@dataclass(slots=True)
class Outcome:
    """What became of a request."""

    model: str = ""  # that answered; a fallback changes it
    replica: str = ""
    attempts: int = 0
    first_byte_s: float | None = None  # from the start of the last attempt
    added_s: float | None = None  # from the arrival of the request until it was sent on
    usage: TokenUsage | None = None
    response: CachedResponse | None = None  # where it is to be kept for equal requests
    begun: bool = False  # a replica has begun to answer
    failures: list[str] = field(default_factory=list)


class ProxiedRequest:
    """One request on its way."""

    def __init__(
        self,
        connection: AsgiConnection,
        body: RequestBody,
        models: Models,
        settings: GatewaySettings,
        *,
        request_id: str,
        max_tokens: int | None = None,
        key: ApiKey | None = None,
        mirror: Mirror | None = None,
        headers: Headers,
        arrived: float,
        record: bool = False,
    ) -> None:
        """`max_tokens` were reserved for each choice; `headers` are sent with the response; `arrived` is when the
        request came in, by the monotonic clock; `record`: the response is collected, to be kept; `mirror` sends copies
        to shadows."""
        self._connection, self._body, self._models, self._settings = connection, body, models, settings
        self._id, self._max_tokens, self._key, self._headers = request_id, max_tokens, key, headers
        self._arrived, self._record, self._mirror = arrived, record, mirror
        self._upstream: UpstreamConnection | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._client_left = False
        self.outcome = Outcome(model=body.model)

    async def run(self) -> None:
        """Answer the client; Problem where no replica could."""
        timer = asyncio.get_running_loop().call_later(_WATCH_AFTER_S, self._watch)
        try:
            await self._run()
        finally:
            timer.cancel()
            if self._watcher is not None:
                self._watcher.cancel()

    def _watch(self) -> None:
        """Notice from now on when the client leaves."""
        self._watcher = asyncio.create_task(self._connection.disconnected())
        self._watcher.add_done_callback(self._left)

    def _left(self, watcher: asyncio.Task[None]) -> None:
        if watcher.cancelled():
            return
        self._client_left = True
        if self._upstream is not None:
            self._upstream.fail("the client left")

    async def _run(self) -> None:
        self._copy()
        for model in self._models.with_fallbacks(self._body.model):
            self.outcome.model = model.name
            if await self._try_replicas(self._models.find(model.name)[1]):
                return
        raise self._no_answer()

    def _copy(self) -> None:
        """A shadow of the model gets the same request, where there is one and it is its turn."""
        shadow = self._models.find(self._body.model)[1].pick_shadow(time.monotonic()) if self._mirror else None
        if self._mirror is not None and shadow is not None:
            self._mirror.send(shadow, self._request(shadow.link), stream=self._body.stream)

    def _no_answer(self) -> Problem:
        failures, name = self.outcome.failures, self._body.model
        if not failures:
            return Problem(503, f"no replica of '{name}' is ready; try again later", code="no_replica", retry_after_s=2)
        text = f"no replica of '{name}' could answer ({'; '.join(failures[-3:])}); try again later"
        is_busy = all(each.endswith("is busy") for each in failures)
        return Problem(503 if is_busy else 502, text, code="no_replica", retry_after_s=2)

    async def _try_replicas(self, router: Router) -> bool:
        """Whether a replica has answered."""
        tried: list[Replica] = []
        salt = self._key.id.encode() if self._key is not None else b""  # prefix caches of keys are apart
        prompt = salt + self._body.prompt if router.needs_prompt else b""
        while len(tried) <= self._settings.retries:
            replica = router.pick(prompt, time.monotonic(), tried)
            if replica is None:
                return False
            tried.append(replica)
            self.outcome.attempts += 1
            self.outcome.replica = replica.name
            if await self._attempt(replica):
                return True
        return False

    async def _attempt(self, replica: Replica) -> bool:
        """One replica; False where it failed before the first byte of its response."""
        replica.in_flight += 1
        trial = replica.breaker.begin()
        try:
            return await self._answered_by(replica)
        except UpstreamError as error:
            if self._client_left:
                raise ClientDisconnected from None
            self._failed(replica, f"{replica.name}: {error}")
            if self._connection.status:
                text = f"the replica failed in the middle of its answer: {error}; send the request again"
                raise Problem(502, text, code="replica_failed") from None
            return False
        finally:
            replica.in_flight -= 1
            if trial:
                replica.breaker.trial_ended()
            if self._upstream is not None:
                self._upstream.release()
                self._upstream = None

    def _failed(self, replica: Replica, reason: str) -> None:
        self.outcome.failures.append(reason)
        replica.failures += 1
        replica.breaker.failed(time.monotonic())

    async def _answered_by(self, replica: Replica) -> bool:
        begin = time.monotonic()
        upstream = await self._begin(replica.link)
        if upstream.status in _BUSY:
            self.outcome.failures.append(f"{replica.name} is busy")
            return False
        if upstream.status in _REFUSED:  # its text may quote the gateway's key
            self._failed(replica, f"{replica.name} refused the gateway's own key")
            return False
        if upstream.status in _FAILED or 300 <= upstream.status < 400:  # redirects lead outside the configuration
            self._failed(replica, f"{replica.name} answered {upstream.status}")
            return False
        first = await upstream.read(self._settings.first_token_timeout_s)
        now, self.outcome.begun = time.monotonic(), True
        self.outcome.first_byte_s = now - begin
        if self.outcome.attempts == 1:
            self.outcome.added_s = begin - self._arrived
        await self._relay(upstream, first)
        replica.breaker.succeeded()
        if upstream.status == 200:
            answered(replica, begin=begin, first=now, usage=self.outcome.usage, stream=self._body.stream)
        return True

    async def _begin(self, link: Link) -> UpstreamConnection:
        """Send the request and wait for the head of the response. A kept connection that the server has just closed is
        replaced by a new one."""
        data = self._request(link)
        upstream = await link.pool.connect()
        while True:
            if self._client_left:
                raise ClientDisconnected
            self._upstream = upstream
            upstream.send(data)
            try:
                await upstream.head(self._settings.first_token_timeout_s)
                return upstream
            except UpstreamError as error:
                if not error.reused or self._client_left:
                    raise
                upstream.abort()
                upstream = await link.pool.connect_new()

    def _request(self, link: Link) -> bytes:
        """The request as the replica gets it: its own head, never the client's key or framing."""
        body = forwarded(
            self._body,
            model=link.settings.model or self.outcome.model,
            max_tokens=self._max_tokens,
            usage=self._body.stream and self._models.find(self.outcome.model)[0].stream_usage,
            key=self._key if link.settings.takes_vllm_fields else None,
        )
        given = self._connection.headers
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"x-request-id", self._id.encode()),
            *((name, given[name]) for name in _TO_REPLICA if name in given),
        ]
        return link.head("POST", self._connection.path, headers) + body

    async def _relay(self, upstream: UpstreamConnection, first: bytes) -> None:
        """Send the response on as it arrives."""
        received = dict(upstream.headers)
        stream = received.get(b"content-type", b"").startswith(EVENT_STREAM)
        guards = self._models.guards(self._body.model)
        guards = guards if guards is not None and guards.checks_output and upstream.status == 200 else None
        reader = UsageReader(stream=stream, hidden=stream and self._body.usage_is_hidden)
        headers = [(name, received[name]) for name in _TO_CLIENT if name in received] + self._headers
        if stream:
            headers.append((b"x-accel-buffering", b"no"))
        connection, idle_s = self._connection, self._settings.idle_timeout_s
        recorder = ResponseRecorder(received.get(b"content-type", b""), stream=stream) if self._record else None
        data = first
        if guards is not None and not stream:
            data = await self._all(upstream, first)
            reader.feed(data)
            shown = await guards.check_response(data)
            if recorder is not None:
                recorder.add(shown)
            await connection.begin(upstream.status, [*headers, (b"content-length", str(len(shown)).encode())])
            await connection.end_events(shown)
        elif guards is not None:
            await connection.begin(upstream.status, headers)
            await self._relay_checked(upstream, first, reader, guards, recorder)
        elif not stream and (length := received.get(b"content-length")) is not None and int(length) == len(first):
            reader.feed(first)
            if recorder is not None:
                recorder.add(first)
            await connection.begin(upstream.status, [*headers, (b"content-length", length)])
            await connection.end_events(first)
        else:
            await connection.begin(upstream.status, headers)
            while data:
                shown = reader.feed(data)
                if recorder is not None:
                    recorder.add(shown)
                if shown:
                    await connection.event(shown)
                data = await upstream.read(idle_s)
            rest = reader.rest()
            if recorder is not None:
                recorder.add(rest)
            await connection.end_events(rest)
        self.outcome.usage = reader.usage()
        if recorder is not None and upstream.status == 200 and self.outcome.model == self._body.model:
            self.outcome.response = recorder.response()

    async def _all(self, upstream: UpstreamConnection, first: bytes) -> bytes:
        """A complete body, which is checked as a whole."""
        parts, size = [first], len(first)
        while part := await upstream.read(self._settings.idle_timeout_s):
            parts.append(part)
            size += len(part)
            if size > _MOST_CHECKED:
                raise UpstreamError("its answer is too large to be checked")
        return b"".join(parts)

    async def _relay_checked(
        self,
        upstream: UpstreamConnection,
        data: bytes,
        reader: UsageReader,
        guards: ModelGuards,
        recorder: ResponseRecorder | None,
    ) -> None:
        """Send a stream on as far as its checks let it pass; one that is blocked ends here and at the replica."""
        connection, checks = self._connection, guards.stream()
        try:
            while data:
                shown = await checks.feed(reader.feed(data))
                if recorder is not None:
                    recorder.add(shown)
                if shown:
                    await connection.event(shown)
                data = await upstream.read(self._settings.idle_timeout_s) if not checks.blocked else b""
            shown = await checks.finish(reader.rest())
            if recorder is not None:
                recorder.add(shown)
            await connection.end_events(shown)
        finally:
            checks.ended()
