"""Routes of the OpenAI-compatible server: API keys, admission, and errors in one form."""

import sys
import time
import traceback
from collections import Counter
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

from armillary.serving.http.api_keys import REFUSAL, ApiKeys
from armillary.serving.http.asgi import AsgiConnection, BodyLimits, ClientDisconnected, Receive, Send
from armillary.serving.http.problem import Problem, bad_request
from armillary.serving.http.server import Say
from armillary.serving.openai.adapter_api import load_adapter, unload_adapter
from armillary.serving.openai.chat import chat, chat_prompt
from armillary.serving.openai.completions import complete
from armillary.serving.openai.embeddings import embed
from armillary.serving.openai.generation_request import refuse_priority
from armillary.serving.openai.messages_request import (
    CountTokensRequest,
    MessagesRequest,
    chat_of_messages,
    tokenize_of_messages,
)
from armillary.serving.openai.messages_response import MessageWriter
from armillary.serving.openai.openapi import document
from armillary.serving.openai.pooled_generation import PooledWriter
from armillary.serving.openai.pooling_request import EmbeddingRequest, PoolingFields, RerankRequest, ScoreRequest
from armillary.serving.openai.request_body import UnknownFields, decode_body
from armillary.serving.openai.rerank import rerank, score
from armillary.serving.openai.response import ResponseWriter
from armillary.serving.openai.responses_request import ResponsesRequest, chat_of_responses
from armillary.serving.openai.responses_response import ResponsesWriter
from armillary.serving.openai.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    SamplingFields,
    TokenizeRequest,
)
from armillary.serving.openai.served_model import ServedModel
from armillary.serving.openai.tracing import Tracing
from armillary.serving.processes.server_metrics import Metrics

T = TypeVar(
    "T",
    ChatRequest,
    CompletionRequest,
    MessagesRequest,
    CountTokensRequest,
    ResponsesRequest,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
    TokenizeRequest,
    DetokenizeRequest,
)
Handler = Callable[[AsgiConnection], Awaitable[None]]
_PAGE = Path(__file__).with_name("chat.html")
_BODY_TIMEOUT_S = 30.0
_MAX_BODY_BYTES_IN_FLIGHT = 512_000_000
_MAX_WAITING = 1024
"""waiting requests where serve.max_waiting is not set"""
_PROMETHEUS = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")


class Endpoint:
    """One route with its key check, error form and response count."""

    def __init__(self, path: str, handler: Handler, metrics: Metrics, keys: ApiKeys) -> None:
        self._path = path
        self._handler = handler
        self._metrics = metrics
        self._keys = keys

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        connection = AsgiConnection(scope, receive, send)
        try:
            connection.refuse_repeated_headers()
            if not self._keys.admits(connection.headers):
                raise Problem(401, REFUSAL, code="invalid_api_key")
            await self._handler(connection)
        except Problem as problem:
            await connection.problem(problem)
        except ClientDisconnected:
            connection.status = 499  # nginx's code for a client that closed the connection
        except Exception:
            traceback.print_exc(file=sys.stderr)
            await connection.problem(Problem(500, "internal error; see the server's log", code="bug"))
        self._metrics.responses[self._path, connection.status] += 1


class ExactRouter:
    """Dispatches exact (method, path) pairs without Starlette's router, which gets everything else."""

    def __init__(self, router: Starlette, endpoints: dict[tuple[str, str], Endpoint]) -> None:
        self._router = router
        self._endpoints = endpoints

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        endpoint = self._endpoints.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        await (self._router if endpoint is None else endpoint)(scope, receive, send)


class Api:
    """The HTTP API of one served model."""

    def __init__(
        self,
        served: ServedModel,
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
        self._users: Counter[int] = Counter()  # requests by the id of the model that serves them
        self._keys = ApiKeys(keys)
        self._bodies = BodyLimits(
            limit=served.serve.max_body_bytes, total=_MAX_BODY_BYTES_IN_FLIGHT, timeout_s=_BODY_TIMEOUT_S
        )
        self._unknown = UnknownFields(say)

    def app(self) -> ExactRouter:
        """The routes; health, metrics and documents need no key."""
        posts: dict[str, Handler] = {
            "/v1/chat/completions": partial(self._generate, ChatRequest, chat, "chat.completion"),
            "/v1/completions": partial(self._generate, CompletionRequest, complete, "text_completion"),
            "/v1/messages": partial(self._translated, MessagesRequest, chat_of_messages, MessageWriter),
            "/v1/messages/count_tokens": self._count_tokens,
            "/v1/responses": partial(self._translated, ResponsesRequest, chat_of_responses, ResponsesWriter),
            "/v1/embeddings": partial(self._generate, EmbeddingRequest, embed, "embedding", writer=PooledWriter),
            "/v1/rerank": partial(self._generate, RerankRequest, rerank, "rerank", writer=PooledWriter),
            "/v1/score": partial(self._generate, ScoreRequest, score, "score", writer=PooledWriter),
            "/v1/load_lora_adapter": partial(self._adapter, load_adapter),
            "/v1/unload_lora_adapter": partial(self._adapter, unload_adapter),
            "/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
        }
        gets = {"/v1/models": self._models, "/v1/models/{model:path}": self._model}
        public = {
            "/": self._page,
            "/health": self._health,
            "/ready": self._ready,
            "/metrics": self._metrics,
            "/openapi.json": self._openapi,
        }
        groups = (("POST", posts, self._keys), ("GET", gets, self._keys), ("GET", public, ApiKeys()))
        endpoints = {
            (method, path): Endpoint(path, handler, self.metrics, keys)
            for method, handlers, keys in groups
            for path, handler in handlers.items()
        }
        routes = [Route(path, endpoint, methods=[method]) for (method, path), endpoint in endpoints.items()]
        router = Starlette(routes=routes, exception_handlers={HTTPException: _no_route})
        router.router.redirect_slashes = False
        return ExactRouter(router, endpoints)

    # --- generation

    async def _generate(
        self,
        schema: Any,
        start: Any,
        kind: str,
        connection: AsgiConnection,
        *,
        writer: type[ResponseWriter] = ResponseWriter,
    ) -> None:
        self._check_admission()  # before the body is read, and again after it, as reading may take long
        body: SamplingFields | PoolingFields = await self._body(connection, schema)
        await self._respond(connection, body, start, kind, writer)

    async def _translated(self, schema: Any, translate: Any, writer: Any, connection: AsgiConnection) -> None:
        """Another API's request, as the chat that it stands for."""
        self._check_admission()
        body = translate(await self._body(connection, schema))
        await self._respond(connection, body, chat, "chat.completion", writer)

    async def _respond(
        self,
        connection: AsgiConnection,
        body: SamplingFields | PoolingFields,
        start: Any,
        kind: str,
        writer: type[ResponseWriter],
    ) -> None:
        begin, generation, status = time.monotonic(), None, 500
        refuse_priority(body, self.served.serve)
        self._check_admission()
        base = self.served  # the model of this request, also where another one replaces it meanwhile
        self.metrics.inflight += 1
        self._users[id(base)] += 1
        try:
            served = base.for_name(body.model)
            generation, formatter = await start(served, body, begin)
            response = writer(connection, generation, formatter, self.metrics, kind=kind, model=served.name)
            await response.send(body)
        except Problem as problem:
            status = problem.status
            raise
        except ClientDisconnected:
            status = 499
            raise
        finally:
            self.metrics.inflight -= 1
            self._users[id(base)] -= 1
            if self.tracing is not None:
                self.tracing.record(connection, kind, generation, begin, connection.status or status)

    def replace_model(self, served: ServedModel) -> ServedModel:
        """Serve new requests with another model; the old one, which still has its requests, is returned."""
        old, self.served = self.served, served
        self.metrics.engine_lost()
        old.engine.retired = True
        return old

    def requests_of(self, served: ServedModel) -> int:
        """Requests in flight on a model."""
        return self._users[id(served)]

    def _check_admission(self) -> None:
        """Problem 503 or 429 where the request cannot be accepted now."""
        if self.draining:
            raise Problem(
                503,
                "the server is shutting down; send the request to another server",
                code="shutting_down",
                retry_after_s=5,
            )
        engine, serve = self.served.engine, self.served.serve
        if engine.state != "ready":
            raise engine.unavailable()
        max_waiting = _MAX_WAITING if serve.max_waiting is None else serve.max_waiting
        if max(self.metrics.inflight, engine.num_requests) >= serve.max_running + max_waiting:
            self.metrics.rejected += 1
            raise Problem(
                429,
                f"{self.metrics.inflight:,} requests are in flight, the most that are accepted; try again later",
                code="rate_limit_exceeded",
                retry_after_s=self._wait_s(),
            )

    def _wait_s(self) -> float:
        """Estimated wait: requests in flight × mean latency / max_running, halved; between 1 and 60 s."""
        times = self.metrics.histograms["e2e_s"]
        count = sum(times.counts)
        mean_s = times.sum / count if count else 1.0
        return min(60.0, max(1.0, mean_s * self.metrics.inflight / self.served.serve.max_running / 2))

    async def _body(self, connection: AsgiConnection, schema: type[T]) -> T:
        data = await connection.body(self._bodies)
        body = decode_body(data, schema)
        self._unknown.check(data, schema)
        self.served.check_name(body.model)
        return body

    # --- the model and its tokenizer

    async def _models(self, connection: AsgiConnection) -> None:
        await connection.json(200, {"object": "list", "data": self.served.cards()})

    async def _model(self, connection: AsgiConnection) -> None:
        name = connection.path.removeprefix("/v1/models/") or "(none)"
        self.served.check_name(name)
        await connection.json(200, next(card for card in self.served.cards() if card["id"] == name))

    async def _adapter(self, change: Any, connection: AsgiConnection) -> None:
        await change(self.served, connection, self._bodies)

    async def _tokenize(self, connection: AsgiConnection) -> None:
        body, served = await self._body(connection, TokenizeRequest), self.served
        if (body.prompt is None) == (body.messages is None):
            raise bad_request("give either prompt or messages", "prompt")
        if body.messages is not None:
            ids = await chat_prompt(served, body, body.messages, body.tools, tokenize_only=True)
        else:
            text, longest = body.prompt or "", self.served.serve.max_body_bytes
            special = body.add_special_tokens is not False
            ids = await served.tokenization.encode(text, longest, "prompt", special=special, tokenize_only=True)
        result: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": served.max_model_len}
        if body.return_token_strs:
            tokenization = served.tokenization
            result["token_strs"] = await tokenization.work(partial(tokenization.token_texts, ids), tokenize_only=True)
        await connection.json(200, result)

    async def _count_tokens(self, connection: AsgiConnection) -> None:
        """As Anthropic's API: the tokens of a prompt."""
        body = tokenize_of_messages(await self._body(connection, CountTokensRequest))
        ids = await chat_prompt(self.served, body, body.messages or [], body.tools, tokenize_only=True)
        await connection.json(200, {"input_tokens": len(ids)})

    async def _detokenize(self, connection: AsgiConnection) -> None:
        body, tokenization = await self._body(connection, DetokenizeRequest), self.served.tokenization
        await connection.json(
            200, {"prompt": await tokenization.work(partial(tokenization.decode, body.tokens), tokenize_only=True)}
        )

    # --- health, metrics, documents

    async def _health(self, connection: AsgiConnection) -> None:
        """For liveness probes: 503 where only a restart of the server can help, so not while the model loads or the
        engine restarts."""
        why = self.served.engine.dead()
        await connection.json(
            200 if why is None else 503, {"status": "ok"} if why is None else {"status": "down", "reason": why}
        )

    def why_not_ready(self) -> str | None:
        """Why the server is not ready; none: it is ready."""
        return "the server is shutting down" if self.draining else self.served.engine.why_not_ready()

    async def _ready(self, connection: AsgiConnection) -> None:
        why = self.why_not_ready()
        state = {"status": "ready" if why is None else "not ready", "reason": why, "model": self.served.name}
        await connection.json(200 if why is None else 503, state)

    async def _metrics(self, connection: AsgiConnection) -> None:
        self.metrics.ready = self.why_not_ready() is None
        await connection.respond(200, self.metrics.page(), _PROMETHEUS)

    async def _openapi(self, connection: AsgiConnection) -> None:
        await connection.json(200, document())

    async def _page(self, connection: AsgiConnection) -> None:
        await connection.respond(200, _PAGE.read_bytes(), (b"content-type", b"text/html; charset=utf-8"))


async def _no_route(request: Request, error: Exception) -> Response:
    """An unknown path or method, in the form of all errors."""
    assert isinstance(error, HTTPException)
    path, allowed = request.url.path, (error.headers or {}).get("allow", (error.headers or {}).get("Allow", ""))
    text = (
        f"{path} takes {allowed}, not {request.method}; use that"
        if error.status_code == 405
        else (f"no path {path}; /openapi.json lists the paths")
    )
    body = encode(Problem(error.status_code, text, code="no_route").body)
    return Response(body, error.status_code, headers=error.headers, media_type="application/json")
