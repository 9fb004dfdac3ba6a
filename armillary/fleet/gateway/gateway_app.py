"""The gateway as an ASGI application: request ids, keys, limits, forwarding, audit and metrics."""

from __future__ import annotations

import asyncio
import sys
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from armillary.fleet.gateway.admin import PREFIX as ADMIN
from armillary.fleet.gateway.admin import AdminApi
from armillary.fleet.gateway.admission import Admission, Reservation
from armillary.fleet.gateway.body import RequestBody, decode
from armillary.fleet.gateway.fair_queue import Share
from armillary.fleet.gateway.gateway_config import GatewaySettings, ModelSettings
from armillary.fleet.gateway.gateway_metrics import GatewayMetrics
from armillary.fleet.gateway.gateway_tracing import GatewayTracing
from armillary.fleet.gateway.keys import ApiKey
from armillary.fleet.gateway.model_routers import Models
from armillary.fleet.gateway.proxy import Outcome, ProxiedRequest
from armillary.fleet.gateway.redis.cache import RedisCache
from armillary.fleet.gateway.response_cache import CachedResponse, ResponseCache
from armillary.fleet.gateway.shadow.mirror import Mirror
from armillary.serving.http.asgi import AsgiConnection, BodyLimits, ClientDisconnected, Receive, Send
from armillary.serving.http.cors import Cors
from armillary.serving.http.json_log import JsonLog
from armillary.serving.http.problem import Problem
from armillary.serving.http.request_id import HEADER as REQUEST_ID
from armillary.serving.http.request_id import request_id_of

PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/rerank",
    "/v1/score",
    "/tokenize",
    "/detokenize",
)
"""what is forwarded to replicas; nothing else ever is"""
_MODEL = "/v1/models/"
_BODY_TIMEOUT_S = 30.0
_PARK_POLL_S = 0.05
_BODIES = 512_000_000
_TEXT = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")


@dataclass(slots=True)
class Arrival:
    """A request as it came in."""

    connection: AsgiConnection
    request_id: str
    begin: float
    key: ApiKey | None = None
    body: RequestBody | None = None
    outcome: Outcome | None = None
    cached: bool = False  # answered by a response that was kept
    reservation: Reservation | None = None
    span: Any = None  # of OpenTelemetry, where traces are sent


class Gateway:
    """Routes of the gateway."""

    def __init__(
        self,
        models: Models,
        admission: Admission,
        settings: GatewaySettings,
        audit: JsonLog,
        metrics: GatewayMetrics,
        *,
        admin: AdminApi | None = None,
        shared_cache: RedisCache | None = None,
        tracing: GatewayTracing | None = None,
    ) -> None:
        self._models, self._admission, self._settings = models, admission, settings
        self._audit, self.metrics = audit, metrics
        self._admin, self._shared_cache, self._tracing = admin, shared_cache, tracing
        self._mirror = Mirror(settings)
        self.draining = False
        self.parked: Counter[str] = Counter()  # model -> requests that wait for a first replica
        self._bodies = BodyLimits(limit=settings.max_body_bytes, total=_BODIES, timeout_s=_BODY_TIMEOUT_S)
        self._cache = ResponseCache(settings.cache_bytes)
        self._cors, self._root_path = Cors(settings.cors_origins), settings.root_path.rstrip("/")
        get: dict[str, Callable[[Arrival], Awaitable[None]]] = {
            "/v1/models": self._list_models,
            "/health": self._health,
            "/ready": self._ready,
            "/metrics": self._metrics_page,
            "/openapi.json": self._openapi,
        }
        self._routes = {("GET", path): handler for path, handler in get.items()}
        self._routes |= {("POST", path): self._forward for path in PATHS}

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        send = self._cors.headers_on(scope, send)
        connection = AsgiConnection(scope, receive, send)
        connection.path = connection.path.removeprefix(self._root_path)
        arrival = Arrival(connection, request_id_of(connection.headers), time.monotonic())
        try:
            if await self._cors.answered_preflight(connection):
                return
            connection.refuse_repeated_headers()
            await self._handler(connection)(arrival)
        except Problem as problem:
            await self._problem(arrival, problem)
        except ClientDisconnected:
            connection.status = 499  # nginx's code for a client that closed the connection
        except Exception:
            traceback.print_exc(file=sys.stderr)
            await self._problem(arrival, Problem(500, "internal error; see the gateway's log", code="bug"))
        if arrival.body is not None or arrival.connection.method == "POST":
            self._record(arrival)

    def add_page(self, path: str, handler: Callable[[Arrival], Awaitable[None]]) -> None:
        """Answer GET `path`, too."""
        self._routes["GET", path] = handler

    def check_reader(self, arrival: Arrival) -> None:
        """Problem 401 or 403 where keys are needed and this one may not read metrics."""
        self._admission.key_of(arrival.connection.headers, "metrics")

    async def close(self) -> None:
        """Close the connections that are not to replicas, and end copies for shadows."""
        await self._mirror.close()
        if self._admin is not None:
            await self._admin.close()
        if self._shared_cache is not None:
            await self._shared_cache.close()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)

    def _handler(self, connection: AsgiConnection) -> Callable[[Arrival], Awaitable[None]]:
        handler = self._routes.get((connection.method, connection.path))
        if handler is not None:
            return handler
        if connection.method == "GET" and connection.path.startswith(_MODEL):
            return self._one_model
        if self._admin is not None and connection.path.startswith(ADMIN):
            return self._answer_admin
        allowed = [method for method, path in self._routes if path == connection.path]
        if allowed:
            raise Problem(405, f"{connection.path[:100]} takes {allowed[0]}, not {connection.method}; use that")
        raise Problem(404, f"no path {connection.path[:100]}; /openapi.json lists the paths", code="no_route")

    async def _problem(self, arrival: Arrival, problem: Problem) -> None:
        arrival.connection.extra_headers = [(REQUEST_ID, arrival.request_id.encode())]
        await arrival.connection.problem(problem)

    async def _answer_admin(self, arrival: Arrival) -> None:
        assert self._admin is not None
        arrival.connection.extra_headers = [(REQUEST_ID, arrival.request_id.encode())]
        await self._admin.answer(arrival.connection)

    # --- forwarding

    async def _forward(self, arrival: Arrival) -> None:
        if self._tracing is not None:
            arrival.span = self._tracing.begin(arrival.connection)
        self._check_capacity()
        arrival.key = self._admission.key_of(arrival.connection.headers)
        arrival.body = body = decode(await arrival.connection.body(self._bodies), arrival.connection.path)
        self._admission.check_model(arrival.key, body.model)
        model, _ = self._models.find(body.model)
        if (guards := self._models.guards(body.model)) is not None:
            arrival.body = body = await guards.check_input(body)
        self._check_capacity()
        self.metrics.in_flight += 1
        try:
            await self._reserved(arrival, body, model)
        finally:
            self.metrics.in_flight -= 1

    async def _reserved(self, arrival: Arrival, body: RequestBody, model: ModelSettings) -> None:
        """Reserve, forward, and return what was not used."""
        cache_key = self._cache_key(arrival, body) if model.cache_s else None
        response = await self._kept(cache_key) if cache_key is not None else None
        chain = self._models.with_fallbacks(body.model)
        reservation = await self._admission.reserve(arrival.key, body, chain, free=response is not None)
        if response is not None:
            return await self._replay(arrival, response)
        arrival.reservation = reservation
        request = self._request(arrival, body, reservation, record=cache_key is not None)
        arrival.outcome = outcome = request.outcome
        try:
            await self._in_turn(arrival, model, request)
        finally:
            if outcome.begun:
                await self._admission.correct(reservation, outcome.usage, self._usd(outcome) or 0.0)
            else:
                await self._admission.cancel(reservation)
        if cache_key is not None and outcome.response is not None:
            await self._keep(cache_key, outcome.response, model.cache_s)

    def _request(
        self, arrival: Arrival, body: RequestBody, reservation: Reservation, *, record: bool
    ) -> ProxiedRequest:
        return ProxiedRequest(
            arrival.connection,
            body,
            self._models,
            self._settings,
            request_id=arrival.request_id,
            max_tokens=reservation.max_tokens,
            key=arrival.key,
            mirror=self._mirror,
            headers=[(REQUEST_ID, arrival.request_id.encode())],
            arrived=arrival.begin,
            record=record,
        )

    async def _in_turn(self, arrival: Arrival, model: ModelSettings, request: ProxiedRequest) -> None:
        """Forward a request, once the model has a slot for this client."""
        if model.managed and not self._models.find(model.name)[1].has_ready:
            await _unless_client_leaves(arrival.connection, self._park(model))
        queue, key = self._models.queue(model.name), arrival.key
        if queue is None:
            return await request.run()
        share = Share(client=key.id, weight=key.weight, priority=key.priority) if key is not None else Share(client="")
        if not queue.take(share):
            await _unless_client_leaves(arrival.connection, queue.wait(share))
        try:
            await request.run()
        finally:
            queue.release(share)

    async def _park(self, model: ModelSettings) -> None:
        """Wait until the model has a replica; Problem 503 where none comes in time."""
        router, deadline = self._models.find(model.name)[1], time.monotonic() + model.max_park_s
        self.parked[model.name] += 1
        try:
            while not router.has_ready:
                if time.monotonic() > deadline or self.draining:
                    text = f"no replica of '{model.name}' was ready within {model.max_park_s:g} s; try again later"
                    raise Problem(503, text, code="no_replica", retry_after_s=5)
                await asyncio.sleep(_PARK_POLL_S)
        finally:
            self.parked[model.name] -= 1

    async def _kept(self, key: bytes) -> CachedResponse | None:
        return await self._shared_cache.get(key) if self._shared_cache is not None else self._cache.get(key)

    async def _keep(self, key: bytes, response: CachedResponse, ttl_s: float) -> None:
        if self._shared_cache is not None:
            await self._shared_cache.put(key, response, ttl_s)
        else:
            self._cache.put(key, response, ttl_s)

    def _usd(self, outcome: Outcome) -> float | None:
        """Price of a response; None where it had no counts."""
        usage = outcome.usage
        return None if usage is None else self._models.find(outcome.model)[0].usd(usage.prompt, usage.completion)

    def _cache_key(self, arrival: Arrival, body: RequestBody) -> bytes | None:
        tenant = arrival.key.id if arrival.key is not None else ""
        return self._cache.key(tenant, body, arrival.connection.headers)

    async def _replay(self, arrival: Arrival, response: CachedResponse) -> None:
        """Send a response that was kept, a stream as a stream."""
        connection, arrival.cached = arrival.connection, True
        headers = [(b"content-type", response.content_type), (b"x-cache", b"hit")]
        headers.append((REQUEST_ID, arrival.request_id.encode()))
        if not response.stream:
            headers.append((b"content-length", str(sum(map(len, response.parts))).encode()))
        await connection.begin(200, headers)
        for part in response.parts:
            await connection.event(part)
        await connection.end_events()

    def _check_capacity(self) -> None:
        if self.draining:
            raise Problem(503, "the gateway is shutting down; use another one", code="shutting_down", retry_after_s=5)
        if self.metrics.in_flight >= self._settings.max_in_flight:
            text = f"{self.metrics.in_flight:,} requests are in flight, the most that are accepted; try again later"
            raise Problem(429, text, code="rate_limit_exceeded", retry_after_s=1)

    # --- after a response

    def _record(self, arrival: Arrival) -> None:
        body, outcome, key = arrival.body, arrival.outcome, arrival.key
        asked = body.model if body is not None else ""
        model = asked if asked in self._models.names else ""
        self.metrics.requests[model, arrival.connection.status] += 1
        if self._tracing is not None and arrival.span is not None:
            self._tracing.end(arrival.span, arrival.connection.status, arrival.request_id, asked[:100], outcome)
        took_s = time.monotonic() - arrival.begin
        usage = outcome.usage if outcome is not None else None
        usd, reserved = None, 0
        if outcome is not None:
            self.metrics.retries += max(0, outcome.attempts - 1)
            if outcome.added_s is not None:
                self.metrics.added(outcome.added_s)
            usd = self._usd(outcome)
            if usage is not None and usd is not None:
                self.metrics.used(key.name if key is not None else "", outcome.model, usage, usd)
            elif outcome.begun and arrival.reservation is not None:  # no counts came: what was reserved is charged
                usd, reserved = arrival.reservation.usd or None, arrival.reservation.tokens
        self._audit.add(
            request=arrival.request_id,
            key=key.id if key is not None else None,
            client=key.name if key is not None else None,
            path=arrival.connection.path[:100],
            model=asked[:100],
            answered_by=outcome.model if outcome is not None and outcome.begun else None,
            replica=outcome.replica if outcome is not None else None,
            attempts=outcome.attempts if outcome is not None else 0,
            status=arrival.connection.status,
            stream=body.stream if body is not None else None,
            seconds=round(took_s, 4),
            first_byte_s=round(outcome.first_byte_s, 4) if outcome is not None and outcome.first_byte_s else None,
            prompt_tokens=usage.prompt if usage is not None else None,
            completion_tokens=usage.completion if usage is not None else None,
            usd=usd,
            reserved_tokens=reserved or None,
            cached=arrival.cached,
        )

    # --- pages

    async def _list_models(self, arrival: Arrival) -> None:
        key = self._admission.key_of(arrival.connection.headers)
        names = [name for name in self._models.names if key is None or key.allows(name)]
        await arrival.connection.json(200, {"object": "list", "data": [_card(name) for name in names]})

    async def _one_model(self, arrival: Arrival) -> None:
        key, name = self._admission.key_of(arrival.connection.headers), arrival.connection.path.removeprefix(_MODEL)
        self._admission.check_model(key, name)
        self._models.find(name)
        await arrival.connection.json(200, _card(name))

    async def _health(self, arrival: Arrival) -> None:
        await arrival.connection.json(200, {"status": "ok"})

    async def _ready(self, arrival: Arrival) -> None:
        """Ready while every model has a replica that gets requests, if need be a slow one."""
        up: dict[str, int] = dict.fromkeys(self._models.names, 0)
        for model, replica in self._models.replicas():
            up[model.name] += replica.up and not replica.drained and not replica.shadow
        have_ready = [self._models.find(name)[1].has_ready for name in up]
        ready = bool(up) and all(have_ready) and not self.draining
        state = {"status": "ready" if ready else "not ready", "replicas_up": up}
        await arrival.connection.json(200 if ready else 503, state)

    async def _openapi(self, arrival: Arrival) -> None:
        from armillary.fleet.gateway.gateway_openapi import document  # its schemas take a moment to import

        await arrival.connection.json(200, document(PATHS, admin=self._admin is not None))

    async def _metrics_page(self, arrival: Arrival) -> None:
        self.check_reader(arrival)
        await arrival.connection.respond(200, self.metrics.page(self._models, self._cache), _TEXT)


def _card(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "armillary"}


async def _unless_client_leaves(connection: AsgiConnection, work: Coroutine[Any, Any, None]) -> None:
    """Wait for `work`; ClientDisconnected, and an end of it, where the client leaves before."""
    watcher, task = asyncio.create_task(connection.disconnected()), asyncio.create_task(work)
    try:
        await asyncio.wait({watcher, task}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected
        task.result()
    finally:
        watcher.cancel()
        task.cancel()
        with suppress(asyncio.CancelledError, Problem):
            await task
