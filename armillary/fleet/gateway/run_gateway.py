"""Run a gateway: bind, check replicas, serve until a signal, drain, and exit with 0."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

from armillary.errors import BadInput
from armillary.fleet.gateway.admin import AdminApi
from armillary.fleet.gateway.admin_signature import AdminGuard, LocalNonces, RedisNonces
from armillary.fleet.gateway.admission import Admission
from armillary.fleet.gateway.budgets import spent_before
from armillary.fleet.gateway.gateway_app import Gateway
from armillary.fleet.gateway.gateway_config import GatewayConfig, GatewaySettings
from armillary.fleet.gateway.gateway_metrics import GatewayMetrics
from armillary.fleet.gateway.gateway_tracing import GatewayTracing
from armillary.fleet.gateway.health import HealthChecker
from armillary.fleet.gateway.keys import KeyRing, KeyStore
from armillary.fleet.gateway.limits import Limiter, LocalLimiter
from armillary.fleet.gateway.model_routers import Models
from armillary.fleet.gateway.redis.cache import RedisCache
from armillary.fleet.gateway.redis.limits import RedisLimiter
from armillary.fleet.gateway.slow_replicas import SlowReplicas
from armillary.fleet.gateway.upstream import ReplicaPool, sweep
from armillary.serving.http.json_log import JsonLog
from armillary.serving.http.server import (
    ListenOptions,
    Say,
    Tls,
    address_of,
    bind,
    http_server,
    ignore_broken_pipe,
    run_event_loop,
    serve_until_signal,
)
from armillary.store.ed25519 import public_keys

_DRAIN_S = 30
_BACKLOG = 2048
"""connections that wait to be accepted, as many as uvicorn's"""
_GC_THRESHOLDS = (1_500, 3, 20)
"""new objects between collections, and collections of each generation per one of the next. An open stream is about 55
objects, and a collection looks at 1,000 in 0.5 to 1.5 ms, during which all streams wait: with 10,000 objects the pauses
while 300 streams opened were 6 to 12 ms (2 cores of a Xeon at 2.5 GHz, 2026-11-19); 700, Python's own, means one every
few requests"""


Companion = Callable[[Gateway, Models, str], Coroutine[Any, Any, None]]
"""what runs beside a gateway until it is cancelled: it gets the gateway's address, too"""


def run_gateway(
    config: GatewayConfig,
    listen: ListenOptions,
    *,
    keys: KeyStore,
    folder: Path,
    say: Say = print,
    companion: Companion | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT; the audit log is in `folder`, where its settings name no other. `companion` runs
    in the same event loop, like an autoscaler that adds and removes replicas."""
    if not config.models:
        raise BadInput("the gateway has no model; give --config FILE with [[models]], or --upstream NAME=URL")
    say = ignore_broken_pipe(say)
    tls = _tls(config)
    sock = bind(listen)
    path = Path(config.gateway.audit).expanduser() if config.gateway.audit else folder / "audit.jsonl"
    audit = JsonLog(path)
    ring = KeyRing(keys, say)
    if not ring.required:
        say("no API key is needed; armillary gateway keys add NAME makes the first, and from then on one is")
    try:
        run_event_loop(_serve(config, sock, keys, ring, audit, path, say, tls, companion))
    finally:
        audit.close()


def _tls(config: GatewayConfig) -> Tls | None:
    settings = config.gateway
    if not settings.tls_certificate:
        return None
    tls = Tls(certificate=Path(settings.tls_certificate).expanduser(), key=Path(settings.tls_key).expanduser())
    tls.check()
    return tls


def make_gateway(
    config: GatewayConfig, keys: KeyStore, ring: KeyRing, limiter: Limiter, audit: JsonLog
) -> tuple[Gateway, Models]:
    """The parts of a gateway, put together."""
    models, settings, metrics = Models(config), config.gateway, GatewayMetrics()
    metrics.slo_limits = {
        "guard_blocked_fraction": settings.max_blocked_fraction,
        "guard_refusal_fraction": settings.max_refusal_fraction,
        "guard_s": settings.max_guard_s,
    }
    admission = Admission(ring, limiter, allow_uncounted=settings.on_redis_failure == "allow")
    admin = AdminApi(_guard(settings), keys, models, metrics) if settings.admin_keys else None
    shared_cache = RedisCache(settings.redis) if settings.cache == "redis" else None
    tracing = GatewayTracing(settings.otlp) if settings.otlp else None
    more = {"admin": admin, "shared_cache": shared_cache, "tracing": tracing}
    return Gateway(models, admission, settings, audit, metrics, **more), models  # type: ignore[arg-type]


def _guard(settings: GatewaySettings) -> AdminGuard:
    nonces = RedisNonces(settings.redis) if settings.redis else LocalNonces()
    return AdminGuard(public_keys(Path(settings.admin_keys).expanduser()), nonces)


async def _serve(
    config: GatewayConfig,
    sock: socket.socket,
    keys: KeyStore,
    ring: KeyRing,
    audit: JsonLog,
    audit_path: Path,
    say: Say,
    tls: Tls | None,
    companion: Companion | None,
) -> None:
    limiter: LocalLimiter | RedisLimiter
    if config.gateway.redis:
        limiter = RedisLimiter(config.gateway.redis, say)
    else:
        limiter = LocalLimiter(totals=spent_before(audit_path, ring.all(), time.time()))
    gateway, models = make_gateway(config, keys, ring, limiter, audit)

    def pools() -> list[ReplicaPool]:
        return [replica.link.pool for _, replica in models.replicas()]

    checker = HealthChecker(models, config.gateway, say)
    await checker.first_round()
    slow = SlowReplicas(models, config.gateway, say)
    background = (sweep(pools), checker.run(), slow.run(), audit.run(say), ring.watch())
    tasks = [asyncio.create_task(each) for each in background]
    if companion is not None:
        tasks.append(asyncio.create_task(_run_companion(companion(gateway, models, address_of(sock, tls)), say)))
    server = http_server(gateway, graceful_s=_DRAIN_S, tls=tls, proxy_headers=False)
    gc.freeze()  # what is there now stays: no collection has to look at it again
    gc.set_threshold(*_GC_THRESHOLDS)

    def drain() -> None:
        gateway.draining = True

    sock.listen(_BACKLOG)  # so that who reads the line is not refused
    say(f"ready on {address_of(sock, tls)} with {', '.join(models.names)}")
    try:
        await serve_until_signal(server, sock, drain=drain)
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task
        for pool in pools():
            pool.close()
        await gateway.close()
        if isinstance(limiter, RedisLimiter):
            await limiter.close()


async def _run_companion(work: Coroutine[Any, Any, None], say: Say) -> None:
    """What fails beside the gateway ends it, with the signal that its operator would send."""
    try:
        await work
    except Exception as error:
        traceback.print_exc()
        say(f"the service ends: {error}")
        os.kill(os.getpid(), signal.SIGTERM)
