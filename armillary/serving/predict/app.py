"""The predict server's routes: /predict, /health, /ready, /schema, /metrics, /openapi.json, and KServe's under /v2."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from armillary.serving.http.api_keys import REFUSAL, ApiKeys
from armillary.serving.http.asgi import (
    BodyLimits,
    BodyTimeout,
    BodyTooLarge,
    ClientDisconnected,
    TooManyBodies,
)
from armillary.serving.http.server import Say
from armillary.serving.predict.batcher import BatcherClosed, QueueFull
from armillary.serving.predict.hot_reload import HotReloader, LoadedVersion
from armillary.serving.predict.json_workers import PREDICT, JsonPool, WireFormat, WorkerLost
from armillary.serving.predict.kserve_api import KserveApi
from armillary.serving.predict.metrics import Metrics
from armillary.serving.predict.openapi import document
from armillary.serving.predict.request import InvalidRequest
from armillary.serving.predict.schema import Schema
from armillary.serving.predict.trusted_files import FileTrust
from armillary.spec.tables.serve import Predict

_STUCK_S = 10.0
"""a batch that runs longer while requests wait makes the server not ready"""
_BODIES = 16
"""bodies of the largest size that may be in flight together"""


class PredictServer:
    """The server's state, handed to its routes."""

    def __init__(
        self,
        path: Path,
        settings: Predict,
        say: Say = lambda text: None,
        *,
        trust: FileTrust,
        keys: tuple[str, ...] = (),
    ) -> None:
        self.settings, self.metrics = settings, Metrics()
        self.name = path.name if path.is_dir() else path.stem
        self.models = HotReloader(path, settings, say, self.metrics.ran, trust)
        self._keys = ApiKeys(keys)
        limit = settings.max_body_bytes
        self._bodies = BodyLimits(limit=limit, total=_BODIES * limit, timeout_s=settings.timeout_s)
        self._json_pool = JsonPool()

    # --- routes

    async def predict(self, request: Request) -> Response:
        return await self.answered(request, PREDICT)

    async def answered(self, request: Request, wire: WireFormat) -> Response:
        """The response to a request for the model's outputs."""
        begin = time.perf_counter()
        if not self.admits(request):
            self.metrics.responded(401, None)
            return _no_key()
        try:
            code, body, version = await self._respond(request, begin, wire)
        except ClientDisconnected:
            return Response(status_code=499)
        self.metrics.responded(code, time.perf_counter() - begin if code == 200 else None)
        headers = {"Retry-After": "1"} if code == 429 else {}
        headers["X-Model-Version"] = version.release.name if version else ""
        return Response(body, code, headers=headers, media_type="application/json")

    async def health(self, request: Request) -> Response:
        """State of the model in three keys; the status is 200 while the process runs."""
        return JSONResponse(
            {
                "status": "degraded" if self.why_not_ready() else "healthy",
                "model_loaded": self.models.current is not None,
                "avg_latency_ms": self.metrics.avg_latency_ms,
            }
        )

    async def ready(self, request: Request) -> Response:
        why = self.why_not_ready()
        return JSONResponse({"ready": not why, "why": why, "reload_problem": self.models.problem}, 503 if why else 200)

    async def schema(self, request: Request) -> Response:
        if not self.admits(request):
            return _no_key()
        version = self.models.current
        if version is None:
            return JSONResponse({"error": "no model is loaded"}, 503)
        limits = version.batcher.limits
        return JSONResponse(
            {
                "version": version.release.name,
                **asdict(version.schema),
                "max_batch": limits.max_batch,
                "max_delay_s": limits.max_delay_s,
                "preferred": list(limits.preferred),
            }
        )

    async def prometheus(self, request: Request) -> Response:
        version = self.models.current
        waiting = version.batcher.waiting_rows if version else 0
        page = self.metrics.page(waiting_rows=waiting, reloads=self.models.reloads)
        return Response(page, media_type="text/plain; version=0.0.4")

    async def openapi(self, request: Request) -> Response:
        version = self.models.current
        return JSONResponse(document(version.schema if version else None))

    async def close(self) -> None:
        """Run every queue empty, and end threads and processes."""
        await self.models.close()
        await asyncio.to_thread(self._json_pool.close)

    # --- inside

    def admits(self, request: Request) -> bool:
        """Whether the request has a key, where one is required."""
        return self._keys.admits(dict(request.headers.raw))

    async def _respond(
        self, request: Request, begin: float, wire: WireFormat
    ) -> tuple[int, bytes, LoadedVersion | None]:
        """(status, body, version that served it)."""
        try:
            async with self._bodies.read(request.receive) as body:
                return await self._predict(body, begin, wire)
        except BodyTimeout:
            return 408, _error(f"the body did not arrive within {self.settings.timeout_s:g} s"), self.models.current
        except BodyTooLarge:
            return 413, _error(f"the body is larger than {self.settings.max_body_bytes:,} bytes"), self.models.current
        except TooManyBodies:
            return 429, _error("too many bodies are in flight; try again in a second"), self.models.current

    async def _predict(self, body: bytes, begin: float, wire: WireFormat) -> tuple[int, bytes, LoadedVersion | None]:
        """By the version that is current once the body is read, or by the next where that one closes meanwhile."""
        while (version := self.models.current) is not None:
            try:
                return *await self._predict_by(version, body, begin, wire), version
            except BatcherClosed:
                if self.models.current is version:
                    return 503, _error("the server is shutting down"), version
        return 503, _error("no model is loaded"), None

    async def _predict_by(
        self, version: LoadedVersion, body: bytes, begin: float, wire: WireFormat
    ) -> tuple[int, bytes]:
        try:
            async with asyncio.timeout(self.settings.timeout_s):
                return 200, await self._run(version, body, begin, wire)
        except BatcherClosed:
            raise
        except InvalidRequest as error:
            return wire.invalid, _error(str(error))
        except QueueFull:
            return 429, _error("too many rows wait; try again in a second")
        except WorkerLost:
            return 503, _error("the process that decodes large requests died on this one; send it again")
        except TimeoutError:
            return 504, _error(f"no result within {self.settings.timeout_s:g} s")
        except Exception as error:  # of the model
            message = " ".join(str(error).split())[:300]
            return (wire.invalid if _is_clients(error, version.schema) else 500), _error(f"the model failed: {message}")

    async def _run(self, version: LoadedVersion, body: bytes, begin: float, wire: WireFormat) -> bytes:
        request = await self._json_pool.read(body, version.schema, max_rows=self.settings.max_queue, wire=wire)
        outputs = await version.batcher.submit(request)
        text = await self._json_pool.write(request, outputs, version.schema, wire)
        if not wire.latency:
            head = json.dumps({"model_name": self.name, "model_version": version.release.name})
            return head[:-1].encode() + b"," + text[1:]
        return text[:-1] + b',"latency_ms":%.3f}' % (1e3 * (time.perf_counter() - begin))

    def why_not_ready(self) -> str:
        """Why requests would wait; empty: they would not."""
        version = self.models.current
        if version is None:
            return "no model is loaded"
        since = version.batcher.running_since
        if since is not None and time.monotonic() - since > _STUCK_S and version.batcher.waiting_rows:
            return f"a batch has run for {time.monotonic() - since:.0f} s"
        return ""


def _is_clients(error: Exception, schema: Schema) -> bool:
    """Whether the request is the likely cause: a value or size that no schema describes (a token outside the
    vocabulary, a length fixed by tracing), judged by the type of the error."""
    if any(field.shape is None for field in schema.inputs):
        return True
    return isinstance(error, IndexError | ValueError | AssertionError) or type(error).__name__ == "InvalidArgument"


async def _no_route(request: Request, error: Exception) -> Response:
    """A path or method that does not exist."""
    assert isinstance(error, HTTPException)
    paths = "POST /predict, GET /health, /ready, /schema, /metrics, /v2"
    text = f"{error.detail}: {request.method} {request.url.path}; {paths}"
    return Response(_error(text), error.status_code, headers=error.headers, media_type="application/json")


def _no_key() -> Response:
    return Response(_error(REFUSAL), 401, media_type="application/json")


def _error(text: str) -> bytes:
    return json.dumps({"error": text}).encode()


def make_app(state: PredictServer) -> Starlette:
    """The ASGI application; it loads the model at its start unless that is done already."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        if state.models.current is None:
            await state.models.load()
        watcher = asyncio.create_task(state.models.watch())
        try:
            yield
        finally:
            watcher.cancel()
            with suppress(asyncio.CancelledError):
                await watcher
            await state.close()

    routes = [
        Route("/predict", state.predict, methods=["POST"]),
        Route("/health", state.health),
        Route("/ready", state.ready),
        Route("/schema", state.schema),
        Route("/metrics", state.prometheus),
        Route("/openapi.json", state.openapi),
        *KserveApi(state).routes(),
    ]
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: _no_route})
