"""The predict server's routes: /predict, /health, /ready, /schema, /metrics, /openapi.json."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from armillary.serving.http.api_keys import REFUSAL, Keys
from armillary.serving.http.body_limits import Bodies, TooLarge, TooMany, TooSlow
from armillary.serving.predict.batcher import Closed, Full
from armillary.serving.predict.hot_reload import Live, Say, Version
from armillary.serving.predict.json_workers import Desk, Lost
from armillary.serving.predict.metrics import Metrics
from armillary.serving.predict.openapi import document
from armillary.serving.predict.request import Unfit
from armillary.serving.predict.schema import Schema
from armillary.serving.predict.trust import Trust
from armillary.spec.tables.predict import Predict

_STUCK_S = 10.0
"""a batch that has run so long while others wait is no good sign"""


class PredictServer:
    """The server's state, handed to its routes."""

    def __init__(
        self, path: Path, settings: Predict, say: Say = lambda text: None, *, trust: Trust, keys: tuple[str, ...] = ()
    ) -> None:
        self.settings, self.metrics = settings, Metrics()
        self.live = Live(path, settings, say, self.metrics.ran, trust)
        self._keys = Keys(keys)
        self._bodies = Bodies(settings.max_body_bytes, settings.timeout_s)
        self._desk = Desk()

    # --- routes

    async def predict(self, request: Request) -> Response:
        begin = time.perf_counter()
        if not self.admits(request):
            self.metrics.answered(401, None)
            return _no_key()
        try:
            code, body, version = await self._answer(request, begin)
        except ClientDisconnect:
            return Response(status_code=499)
        self.metrics.answered(code, time.perf_counter() - begin if code == 200 else None)
        headers = {"Retry-After": "1"} if code == 429 else {}
        headers["X-Model-Version"] = version.release.name if version else ""
        return Response(body, code, headers=headers, media_type="application/json")

    async def health(self, request: Request) -> Response:
        """Truth about the model, in three keys; it answers 200 as long as the process does."""
        why = self._why_not_ready()
        return JSONResponse(
            {
                "status": "degraded" if why else "healthy",
                "model_loaded": self.live.current is not None,
                "avg_latency_ms": self.metrics.avg_latency_ms,
            }
        )

    async def ready(self, request: Request) -> Response:
        why = self._why_not_ready()
        return JSONResponse({"ready": not why, "why": why, "reload_problem": self.live.problem}, 503 if why else 200)

    async def schema(self, request: Request) -> Response:
        if not self.admits(request):
            return _no_key()
        version = self.live.current
        if version is None:
            return JSONResponse({"error": "no model is loaded"}, 503)
        limits = version.batcher.limits
        return JSONResponse(
            {
                "version": version.release.name,
                **version.schema.plain(),
                "max_batch": limits.max_batch,
                "max_delay_s": limits.max_delay_s,
                "preferred": list(limits.preferred),
            }
        )

    async def prometheus(self, request: Request) -> Response:
        version = self.live.current
        waiting = version.batcher.waiting_rows if version else 0
        text = self.metrics.text(waiting_rows=waiting, reloads=self.live.reloads)
        return Response(text, media_type="text/plain; version=0.0.4")

    async def openapi(self, request: Request) -> Response:
        version = self.live.current
        return JSONResponse(document(version.schema if version else None))

    async def close(self) -> None:
        """Let every queue run empty, and end what was started."""
        await self.live.close()
        await asyncio.to_thread(self._desk.close)

    # --- inside

    def admits(self, request: Request) -> bool:
        """Whether the request brings a key, where one is asked for."""
        return self._keys.admits(dict(request.headers.raw))

    async def _answer(self, request: Request, begin: float) -> tuple[int, bytes, Version | None]:
        """Status, body, and the version that was asked."""
        try:
            async with self._bodies.whole(request) as body:
                return await self._answered(body, begin)
        except TooSlow:
            return 408, _error(f"the body did not come within {self.settings.timeout_s:g} s"), self.live.current
        except TooLarge:
            return 413, _error(f"the body is larger than {self.settings.max_body_bytes:,} bytes"), self.live.current
        except TooMany:
            return 429, _error("too many bodies are on their way; try again in a second"), self.live.current

    async def _answered(self, body: bytes, begin: float) -> tuple[int, bytes, Version | None]:
        """By the version that is current once the body is there, or by the next where it goes meanwhile."""
        while (version := self.live.current) is not None:
            try:
                return *await self._asked(version, body, begin), version
            except Closed:
                if self.live.current is version:
                    return 503, _error("the server is shutting down"), version
        return 503, _error("no model is loaded"), None

    async def _asked(self, version: Version, body: bytes, begin: float) -> tuple[int, bytes]:
        try:
            async with asyncio.timeout(self.settings.timeout_s):
                return 200, await self._run(version, body, begin)
        except Closed:
            raise
        except Unfit as error:
            return 422, _error(str(error))
        except Full:
            return 429, _error("too many rows wait; try again in a second")
        except Lost:
            return 503, _error("the process that reads large requests died over this one; send it again")
        except TimeoutError:
            return 504, _error(f"no answer within {self.settings.timeout_s:g} s")
        except Exception as error:  # the model's own
            said = " ".join(str(error).split())[:300]
            return (422 if _is_clients(error, version.schema) else 500), _error(f"the model failed: {said}")

    async def _run(self, version: Version, body: bytes, begin: float) -> bytes:
        asked = await self._desk.read(body, version.schema, most_rows=self.settings.max_queue)
        outputs = await version.batcher.submit(asked)
        found = await self._desk.write(asked, outputs, version.schema)
        return found[:-1] + b',"latency_ms":%.3f}' % (1e3 * (time.perf_counter() - begin))

    def _why_not_ready(self) -> str:
        version = self.live.current
        if version is None:
            return "no model is loaded"
        since = version.batcher.running_since
        if since is not None and time.monotonic() - since > _STUCK_S and version.batcher.waiting_rows:
            return f"a batch has run for {time.monotonic() - since:.0f} s"
        return ""


def _is_clients(error: Exception, schema: Schema) -> bool:
    """Whether values or sizes that no schema can tell (a token beyond the vocabulary, a length the trace has settled)
    are the reason, as far as the kind of error says."""
    if any(field.shape is None for field in schema.inputs):
        return True
    return isinstance(error, IndexError | ValueError | AssertionError) or type(error).__name__ == "InvalidArgument"


async def _refused(request: Request, error: Exception) -> Response:
    """A path or method that does not exist."""
    assert isinstance(error, HTTPException)
    text = f"{error.detail}: {request.method} {request.url.path}; POST /predict, GET /health, /ready, /schema, /metrics"
    return Response(_error(text), error.status_code, headers=error.headers, media_type="application/json")


def _no_key() -> Response:
    return Response(_error(REFUSAL), 401, media_type="application/json")


def _error(text: str) -> bytes:
    return json.dumps({"error": text}).encode()


def make_app(state: PredictServer) -> Starlette:
    """The ASGI application; the model is loaded when it starts, unless it is."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        if state.live.current is None:
            await state.live.load()
        watching = asyncio.create_task(state.live.watch())
        try:
            yield
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching
            await state.close()

    routes = [
        Route("/predict", state.predict, methods=["POST"]),
        Route("/health", state.health),
        Route("/ready", state.ready),
        Route("/schema", state.schema),
        Route("/metrics", state.prometheus),
        Route("/openapi.json", state.openapi),
    ]
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: _refused})
