"""The server's routes, over ASGI: who may ask, how many may wait, and errors in one shape."""

from __future__ import annotations

import asyncio
import hmac
import json
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from armillary.serving.api import schemas
from armillary.serving.api.chat import chat, prompt_of
from armillary.serving.api.check import check
from armillary.serving.api.completions import complete
from armillary.serving.api.exchange import ClientGone, Exchange, Receive, Send
from armillary.serving.api.metrics import Metrics
from armillary.serving.api.openapi import document
from armillary.serving.api.problem import Problem, bad
from armillary.serving.api.reply import Reply
from armillary.serving.api.served import Served

Handler = Callable[[Exchange], Awaitable[None]]
_PAGE = Path(__file__).with_name("chat.html")
_MOST_WAITING = 1024
"""requests that may wait, where serve.max_waiting does not say"""
_OPEN = frozenset({"/", "/health", "/ready", "/metrics", "/openapi.json"})
"""paths that need no key"""


class App:
    """All routes of one served model."""

    def __init__(self, served: Served, metrics: Metrics, *, keys: tuple[str, ...] = ()) -> None:
        self.served = served
        self.metrics = metrics
        self.draining = False
        """no more requests are taken"""
        self._keys = [key.encode() for key in keys]
        self._routes: dict[str, tuple[str, Handler]] = {
            "/v1/chat/completions": ("POST", self._chat), "/v1/completions": ("POST", self._complete),
            "/v1/models": ("GET", self._models), "/v1/models/": ("GET", self._model),
            "/tokenize": ("POST", self._tokenize), "/detokenize": ("POST", self._detokenize),
            "/health": ("GET", self._health), "/ready": ("GET", self._ready), "/metrics": ("GET", self._metrics),
            "/openapi.json": ("GET", self._openapi), "/": ("GET", self._page),
        }  # fmt: skip

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", "uvicorn is told that there is nothing else"
        exchange = Exchange(scope, receive, send)
        try:
            await self._route(exchange)
        except Problem as problem:
            await exchange.problem(problem)
        except ClientGone:
            exchange.status = 499  # as nginx counts those who left
        except asyncio.CancelledError:
            raise
        except Exception:
            traceback.print_exc(file=sys.stderr)
            await exchange.problem(Problem(500, "a bug of the server; its log says more", code="bug"))
        path = exchange.path if exchange.path in self._routes else "other"
        self.metrics.responses[path, exchange.status] += 1

    async def _route(self, exchange: Exchange) -> None:
        self._admit(exchange)
        path = "/v1/models/" if exchange.path.startswith("/v1/models/") else exchange.path
        if path not in self._routes:
            raise Problem(404, f"no path {path}; /openapi.json lists what there is", code="not_found")
        method, handler = self._routes[path]
        if exchange.method != method and not (method == "GET" and exchange.method == "HEAD"):
            problem = Problem(405, f"{exchange.path} takes {method}, not {exchange.method}; use that")
            return await exchange.json(405, problem.body, [(b"allow", method.encode())])
        await handler(exchange)

    def _admit(self, exchange: Exchange) -> None:
        """Problem 401 where a key is asked for and not given."""
        if not self._keys or exchange.path in _OPEN:
            return
        given = exchange.headers.get(b"authorization", b"")
        key = given[7:] if given[:7].lower() == b"bearer " else exchange.headers.get(b"x-api-key", b"")
        if not any([hmac.compare_digest(key, known) for known in self._keys]):
            raise Problem(401, "the API key is missing or wrong; send it as Authorization: Bearer KEY",
                          code="invalid_api_key")  # fmt: skip

    # --- answers of the model

    async def _chat(self, exchange: Exchange) -> None:
        await self._answer(exchange, schemas.CHAT, chat, "chat.completion")

    async def _complete(self, exchange: Exchange) -> None:
        await self._answer(exchange, schemas.COMPLETION, complete, "text_completion")

    async def _answer(self, exchange: Exchange, schema: schemas.Schema, ask: Any, kind: str) -> None:
        begin = time.monotonic()
        self._make_room()
        self.metrics.inflight += 1
        try:
            body = await self._body(exchange, schema)
            answering, form = await ask(self.served, body, begin)
            reply = Reply(exchange, answering, form, kind=kind, model=self.served.name)
            await reply.send(body)
        finally:
            self.metrics.inflight -= 1

    def _make_room(self) -> None:
        """Problem 503 or 429 where the request cannot be taken now; before its body is looked at."""
        if self.draining:
            raise Problem(503, "the server is shutting down; ask another one", code="shutting_down", retry_after_s=5)
        engine, serve = self.served.engine, self.served.serve
        if engine.state != "ready":
            raise engine.unavailable()
        waiting = _MOST_WAITING if serve.max_waiting is None else serve.max_waiting
        if max(self.metrics.inflight, engine.num_requests) >= serve.max_running + waiting:
            self.metrics.rejected += 1
            raise Problem(429, f"{self.metrics.inflight:,} requests are here, as many as may; try again later",
                          code="rate_limit_exceeded", retry_after_s=self._wait_s())  # fmt: skip

    def _wait_s(self) -> float:
        """When there may be room: the queue over the pace of late, by what requests took."""
        times = self.metrics.histograms["e2e_s"]
        count = sum(times.counts)
        mean_s = times.sum / count if count else 1.0
        return min(60.0, max(1.0, mean_s * self.metrics.inflight / self.served.serve.max_running / 2))

    async def _body(self, exchange: Exchange, schema: schemas.Schema) -> dict[str, Any]:
        body = await exchange.table(self.served.serve.max_body_bytes)
        check(body, schema)
        self.served.check_name(body.get("model"))
        return body

    # --- the model and its tokenizer

    async def _models(self, exchange: Exchange) -> None:
        await exchange.json(200, {"object": "list", "data": [self.served.card()]})

    async def _model(self, exchange: Exchange) -> None:
        self.served.check_name(exchange.path.removeprefix("/v1/models/") or "(none)")
        await exchange.json(200, self.served.card())

    async def _tokenize(self, exchange: Exchange) -> None:
        body = await self._body(exchange, schemas.TOKENIZE)
        served, longest = self.served, self.served.serve.max_body_bytes
        if ("prompt" in body) == ("messages" in body):
            raise bad("give either prompt or messages", "prompt")
        if "messages" in body:
            ids = await prompt_of(served, body, body.get("tools"))
        else:
            special = body.get("add_special_tokens") is not False
            ids = await served.texts.encode(body["prompt"], longest, "prompt", special=special)
        found: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": served.max_model_len}
        if body.get("return_token_strs"):
            found["token_strs"] = [served.texts.token_text(token)[0] for token in ids]
        await exchange.json(200, found)

    async def _detokenize(self, exchange: Exchange) -> None:
        body = await self._body(exchange, schemas.DETOKENIZE)
        await exchange.json(200, {"prompt": await asyncio.to_thread(self.served.texts.decode, body["tokens"])})

    # --- how it is doing

    async def _health(self, exchange: Exchange) -> None:
        await exchange.json(200, {"status": "ok"})

    async def _ready(self, exchange: Exchange) -> None:
        why = "the server is shutting down" if self.draining else self.served.engine.trouble()
        self.metrics.ready = why is None
        state = {"status": "ready" if why is None else "not ready", "reason": why, "model": self.served.name}
        await exchange.json(200 if why is None else 503, state)

    async def _metrics(self, exchange: Exchange) -> None:
        self.metrics.ready = not self.draining and self.served.engine.trouble() is None
        kind = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")
        await exchange.answer(200, self.metrics.page(), kind)

    async def _openapi(self, exchange: Exchange) -> None:
        await exchange.answer(200, json.dumps(document()).encode())

    async def _page(self, exchange: Exchange) -> None:
        await exchange.answer(200, _PAGE.read_bytes(), (b"content-type", b"text/html; charset=utf-8"))
