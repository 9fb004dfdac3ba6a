"""From answers to what goes over the wire, whole or as events; completions and chats differ in their `Form` alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Any, Protocol
from uuid import uuid4

from msgspec.json import encode

from armillary.serving.http.asgi import ClientGone, Exchange
from armillary.serving.http.problem import Problem
from armillary.serving.openai.generation import Answering, Piece
from armillary.serving.openai.sampling_request import late
from armillary.serving.openai.schemas import Asked, StreamOptions
from armillary.serving.processes.server_metrics import Metrics

_GRACE_S = 5.0
"""the engine gives a request up at its time; where even that does not come, the server does, so much later"""


class Form(Protocol):
    """How an endpoint writes its answers."""

    def open(self) -> Iterable[dict[str, Any]]:
        """Choices of the first event, before anything has come."""

    def grow(self, piece: Piece) -> Iterable[dict[str, Any]]:
        """Choices of events for what is new."""

    def finish_of(self, choice: int) -> str:
        """Why a choice that is over has ended, as the client is told."""

    def whole(self) -> list[dict[str, Any]]:
        """All choices, once they are complete."""


class Reply:
    """One answer to a client."""

    def __init__(
        self, exchange: Exchange, answering: Answering, form: Form, metrics: Metrics, *, kind: str, model: str
    ) -> None:
        self._exchange = exchange
        self._metrics = metrics
        self._answering = answering
        self._form = form
        self._kind = kind
        self.id = f"{'chatcmpl' if kind.startswith('chat') else 'cmpl'}-{uuid4().hex}"
        self._head = {
            "id": self.id,
            "object": kind,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": None,
        }

    async def send(self, body: Asked) -> None:
        """Wait for the answers and send them; a client that leaves gives them up."""
        answering, timeout_s, watcher = self._answering, self._answering.wish.timeout_s, None
        rest: str | None = "abort"
        try:
            answering.send()  # before all else: the engine need not wait for what we do beside it
            watcher = self._watch()
            async with asyncio.timeout(None if timeout_s is None else timeout_s + _GRACE_S):
                await (self._stream(body.stream_options or StreamOptions()) if body.stream else self._all())
        except TimeoutError:
            rest = "deadline"
            raise late(answering.wish) from None
        except Problem as problem:
            rest = _how(problem)
            raise
        finally:
            answering.close()
            if watcher is not None:
                watcher.cancel()
            self._count(rest)

    def _watch(self) -> asyncio.Task[None]:
        """Ends the answers when the client has hung up."""
        box, watcher = self._answering.box, asyncio.create_task(self._exchange.gone())
        watcher.add_done_callback(lambda task: None if task.cancelled() else box.fail(ClientGone()))
        return watcher

    def _count(self, rest: str | None) -> None:
        """Answers by their ends; of those that came to none, `rest` says what became of them."""
        for choice in range(len(self._answering.texts)):
            finish = self._form.finish_of(choice) if choice in self._answering.over else rest
            if finish is not None:
                self._metrics.finished[finish] += 1

    async def _all(self) -> None:
        async for pieces in self._answering.pieces():
            for piece in pieces:
                for _ in self._form.grow(piece):
                    pass
        await self._exchange.json(200, self._head | {"choices": self._form.whole(), "usage": self._answering.usage()})

    async def _stream(self, options: StreamOptions) -> None:
        head = b"data: " + encode(self._head | {"object": _chunk_kind(self._kind)})[:-1] + b',"choices":['
        exchange, form, first = self._exchange, self._form, True
        async for pieces in self._answering.pieces():
            choices = []
            if first:
                await exchange.begin_events()
                choices, first = [*form.open()], False
            for piece in pieces:
                choices += form.grow(piece)
            if choices:
                tail = b"]" + self._usage(options) + b"}\n\n"
                await exchange.event(b"".join([head + encode(choice) + tail for choice in choices]))
        last = head + b'],"usage":' + encode(self._answering.usage()) + b"}\n\n" if options.include_usage else b""
        await exchange.end_events(last + b"data: [DONE]\n\n")

    def _usage(self, options: StreamOptions) -> bytes:
        """What every event says of it."""
        if options.continuous_usage_stats:
            return b',"usage":' + bytes(encode(self._answering.usage()))
        return b',"usage":null' if options.include_usage else b""


def _how(problem: Problem) -> str | None:
    """What an answer that failed is counted as; none: it was refused before there was one."""
    if problem.code in ("timeout", "aborted"):
        return "deadline" if problem.code == "timeout" else "abort"
    return None if problem.status in (400, 429) and problem.code != "structure_failed" else "error"


def _chunk_kind(kind: str) -> str:
    """Pieces of chats have a name of their own."""
    return f"{kind}.chunk" if kind.startswith("chat") else kind
