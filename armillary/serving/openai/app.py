"""The server's routes: who may ask, how many may wait, and errors in one shape."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from msgspec.json import encode
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from armillary.serving.http.api_keys import REFUSAL, Keys
from armillary.serving.http.asgi import Budget, ClientGone, Exchange, Receive, Send
from armillary.serving.http.lines import Say
from armillary.serving.http.problem import Problem, bad
from armillary.serving.openai.chat import chat, prompt_of
from armillary.serving.openai.completions import complete
from armillary.serving.openai.openapi import document
from armillary.serving.openai.response import Reply
from armillary.serving.openai.sampling_request import refuse_priority
from armillary.serving.openai.schemas import Asked, Chat, Completion, Detokenize, Tokenize, read
from armillary.serving.openai.served_model import Served
from armillary.serving.openai.tracing import Tracing
from armillary.serving.openai.unknown_fields import UnknownFields
from armillary.serving.processes.server_metrics import Metrics

T = TypeVar("T", Chat, Completion, Tokenize, Detokenize)
Handler = Callable[[Exchange], Awaitable[None]]
_PAGE = Path(__file__).with_name("chat.html")
_MOST_BODIES = 512_000_000
"""bytes of bodies that are on their way"""
_MOST_WAITING = 1024
"""requests that may wait, where serve.max_waiting does not say"""


class Endpoint:
    """A route that writes its own answer, because most of ours come piece by piece."""

    def __init__(self, path: str, handler: Handler, metrics: Metrics, keys: Keys) -> None:
        self._path = path
        self._handler = handler
        self._metrics = metrics
        self._keys = keys

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        try:
            self._admit(exchange)
            await self._handler(exchange)
        except Problem as problem:
            await exchange.problem(problem)
        except ClientGone:
            exchange.status = 499  # as nginx counts those who left
        except Exception:
            traceback.print_exc(file=sys.stderr)
            await exchange.problem(Problem(500, "a bug of the server; its log says more", code="bug"))
        self._metrics.responses[self._path, exchange.status] += 1

    def _admit(self, exchange: Exchange) -> None:
        """Problem 401 where a key is asked for and not given."""
        if not self._keys.admits(exchange.headers):
            raise Problem(401, REFUSAL, code="invalid_api_key")


class Front:
    """Finds the endpoint of a path and method that are written out; whatever else is asked goes through the router."""

    def __init__(self, router: Starlette, endpoints: dict[tuple[str, str], Endpoint]) -> None:
        self._router = router
        self._endpoints = endpoints

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        found = self._endpoints.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        await (self._router if found is None else found)(scope, receive, send)


class Api:
    """What can be asked of one served model."""

    def __init__(
        self,
        served: Served,
        metrics: Metrics,
        *,
        keys: tuple[str, ...] = (),
        tracing: Tracing | None = None,
        say: Say = print,
    ) -> None:
        self.served = served
        self.metrics = metrics
        self.tracing = tracing
        self.draining = False
        """no more requests are taken"""
        self._keys = Keys(keys)
        self._bodies = Budget(_MOST_BODIES)
        self._unknown = UnknownFields(say)

    def app(self) -> Front:
        """The routes; those that tell how the server is doing need no key."""
        posts = {
            "/v1/chat/completions": self._chat,
            "/v1/completions": self._complete,
            "/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
        }
        gets = {"/v1/models": self._models, "/v1/models/{model:path}": self._model}
        opened = {
            "/": self._page,
            "/health": self._health,
            "/ready": self._ready,
            "/metrics": self._metrics,
            "/openapi.json": self._openapi,
        }
        made = {("POST", path): Endpoint(path, handler, self.metrics, self._keys) for path, handler in posts.items()}
        made |= {("GET", path): Endpoint(path, handler, self.metrics, self._keys) for path, handler in gets.items()}
        made |= {("GET", path): Endpoint(path, handler, self.metrics, Keys()) for path, handler in opened.items()}
        routes = [Route(path, endpoint, methods=[method]) for (method, path), endpoint in made.items()]
        router = Starlette(routes=routes, exception_handlers={HTTPException: _no_route})
        router.router.redirect_slashes = False
        return Front(router, made)

    # --- answers of the model

    async def _chat(self, exchange: Exchange) -> None:
        await self._answer(exchange, Chat, chat, "chat.completion")

    async def _complete(self, exchange: Exchange) -> None:
        await self._answer(exchange, Completion, complete, "text_completion")

    async def _answer(self, exchange: Exchange, schema: Any, ask: Any, kind: str) -> None:
        begin, answering, status = time.monotonic(), None, 500
        self._make_room()  # before its body is looked at, and again when that has come, which may have taken long
        body: Asked = await self._body(exchange, schema)
        refuse_priority(body, self.served.serve)
        self._make_room()
        self.metrics.inflight += 1
        try:
            answering, form = await ask(self.served, body, begin)
            await Reply(exchange, answering, form, self.metrics, kind=kind, model=self.served.name).send(body)
        except Problem as problem:
            status = problem.status
            raise
        except ClientGone:
            status = 499
            raise
        finally:
            self.metrics.inflight -= 1
            if self.tracing is not None:
                self.tracing.record(exchange, kind, answering, begin, exchange.status or status)

    def _make_room(self) -> None:
        """Problem 503 or 429 where the request cannot be taken now."""
        if self.draining:
            raise Problem(503, "the server is shutting down; ask another one", code="shutting_down", retry_after_s=5)
        engine, serve = self.served.engine, self.served.serve
        if engine.state != "ready":
            raise engine.unavailable()
        waiting = _MOST_WAITING if serve.max_waiting is None else serve.max_waiting
        if max(self.metrics.inflight, engine.num_requests) >= serve.max_running + waiting:
            self.metrics.rejected += 1
            raise Problem(
                429,
                f"{self.metrics.inflight:,} requests are here, as many as may; try again later",
                code="rate_limit_exceeded",
                retry_after_s=self._wait_s(),
            )

    def _wait_s(self) -> float:
        """When there may be room: the queue over the pace of late, by what requests took."""
        times = self.metrics.histograms["e2e_s"]
        count = sum(times.counts)
        mean_s = times.sum / count if count else 1.0
        return min(60.0, max(1.0, mean_s * self.metrics.inflight / self.served.serve.max_running / 2))

    async def _body(self, exchange: Exchange, schema: type[T]) -> T:
        given = await exchange.body(self.served.serve.max_body_bytes, self._bodies)
        body = read(given, schema)
        self._unknown.check(given, schema)
        self.served.check_name(body.model)
        return body

    # --- the model and its tokenizer

    async def _models(self, exchange: Exchange) -> None:
        await exchange.json(200, {"object": "list", "data": [self.served.card()]})

    async def _model(self, exchange: Exchange) -> None:
        self.served.check_name(exchange.path.removeprefix("/v1/models/") or "(none)")
        await exchange.json(200, self.served.card())

    async def _tokenize(self, exchange: Exchange) -> None:
        body, served = await self._body(exchange, Tokenize), self.served
        if (body.prompt is None) == (body.messages is None):
            raise bad("give either prompt or messages", "prompt")
        if body.messages is not None:
            ids = await prompt_of(served, body, body.messages, body.tools, aside=True)
        else:
            text, longest = body.prompt or "", self.served.serve.max_body_bytes
            special = body.add_special_tokens is not False
            ids = await served.texts.encode(text, longest, "prompt", special=special, aside=True)
        found: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": served.max_model_len}
        if body.return_token_strs:
            found["token_strs"] = await served.texts.work(partial(served.texts.token_texts, ids), aside=True)
        await exchange.json(200, found)

    async def _detokenize(self, exchange: Exchange) -> None:
        body, texts = await self._body(exchange, Detokenize), self.served.texts
        await exchange.json(200, {"prompt": await texts.work(partial(texts.decode, body.tokens), aside=True)})

    # --- how it is doing

    async def _health(self, exchange: Exchange) -> None:
        """For liveness probes: 503 where only a new server may help, so not while a model is loaded or an engine is
        started again."""
        why = self.served.engine.dead()
        await exchange.json(
            200 if why is None else 503, {"status": "ok"} if why is None else {"status": "down", "reason": why}
        )

    def trouble(self) -> str | None:
        """Why it is not ready; none: it is."""
        return "the server is shutting down" if self.draining else self.served.engine.trouble()

    async def _ready(self, exchange: Exchange) -> None:
        why = self.trouble()
        state = {"status": "ready" if why is None else "not ready", "reason": why, "model": self.served.name}
        await exchange.json(200 if why is None else 503, state)

    async def _metrics(self, exchange: Exchange) -> None:
        self.metrics.ready = self.trouble() is None
        kind = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")
        await exchange.answer(200, self.metrics.page(), kind)

    async def _openapi(self, exchange: Exchange) -> None:
        await exchange.json(200, document())

    async def _page(self, exchange: Exchange) -> None:
        await exchange.answer(200, _PAGE.read_bytes(), (b"content-type", b"text/html; charset=utf-8"))


async def _no_route(request: Request, error: Exception) -> Response:
    """A path or method that there is not, in the shape of all errors."""
    assert isinstance(error, HTTPException)
    path, allowed = request.url.path, (error.headers or {}).get("allow", (error.headers or {}).get("Allow", ""))
    text = (
        f"{path} takes {allowed}, not {request.method}; use that"
        if error.status_code == 405
        else (f"no path {path}; /openapi.json lists what there is")
    )
    body = encode(Problem(error.status_code, text, code="no_route").body)
    return Response(body, error.status_code, headers=error.headers, media_type="application/json")
