"""Writes the response of a generation, complete or as server-sent events; a `ChoiceFormatter` per endpoint."""

import asyncio
import time
from collections.abc import Iterable
from typing import Any, Protocol
from uuid import uuid4

from msgspec.json import encode

from armillary.serving.http.asgi import AsgiConnection, ClientDisconnected
from armillary.serving.http.problem import Problem
from armillary.serving.openai.generation import ChoiceDelta, Generation
from armillary.serving.openai.generation_request import timeout_problem
from armillary.serving.openai.pooling_request import PoolingFields
from armillary.serving.openai.schemas import SamplingFields, StreamOptions
from armillary.serving.processes.server_metrics import Metrics

_GRACE_S = 5.0
"""the engine ends a request at its timeout; the server does so this much later where the engine does not respond"""


class ChoiceFormatter(Protocol):
    """How an endpoint writes its choices."""

    def first_choices(self) -> Iterable[dict[str, Any]]:
        """Choices of the first event, before any text."""

    def add(self, delta: ChoiceDelta) -> Iterable[dict[str, Any]]:
        """Choices of the events for a delta."""

    def finish_reason(self, choice: int) -> str:
        """The finish_reason of a choice that has ended."""

    def choices(self) -> list[dict[str, Any]]:
        """All choices, once they have ended."""


class ResponseWriter:
    """Writes one response."""

    def __init__(
        self,
        connection: AsgiConnection,
        generation: Generation,
        formatter: ChoiceFormatter,
        metrics: Metrics,
        *,
        kind: str,
        model: str,
    ) -> None:
        self._connection = connection
        self._metrics = metrics
        self._generation = generation
        self._formatter = formatter
        self._is_chat = kind.startswith("chat")
        self._head = {
            "id": f"{'chatcmpl' if self._is_chat else 'cmpl'}-{uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": None,
        }

    async def send(self, body: SamplingFields | PoolingFields) -> None:
        """Submit the generation and send its response; a client that disconnects aborts it."""
        generation, timeout_s, watcher = self._generation, self._generation.request.timeout_s, None
        unfinished: str | None = "abort"
        try:
            generation.send()  # first, so that the engine works while the server prepares the response
            watcher = asyncio.create_task(self._connection.disconnected())
            watcher.add_done_callback(self._client_left)
            async with asyncio.timeout(None if timeout_s is None else timeout_s + _GRACE_S):
                await (self._stream(body.stream_options or StreamOptions()) if body.stream else self._complete())
        except TimeoutError:
            unfinished = "deadline"
            raise timeout_problem(generation.request) from None
        except Problem as problem:
            unfinished = _finish_of(problem)
            raise
        finally:
            generation.close()
            if watcher is not None:
                watcher.cancel()
            self._count(unfinished)

    def _client_left(self, watcher: asyncio.Task[None]) -> None:
        if not watcher.cancelled():
            self._generation.box.fail(ClientDisconnected())

    def _count(self, unfinished: str | None) -> None:
        """Count choices by finish reason; those that did not finish count as `unfinished`."""
        for choice in range(len(self._generation.texts)):
            finish = self._formatter.finish_reason(choice) if choice in self._generation.finished else unfinished
            if finish is not None:
                self._metrics.finished[finish] += 1

    async def _complete(self) -> None:
        async for deltas in self._generation.deltas():
            for delta in deltas:
                self._formatter.add(delta)
        choices, usage = self._formatter.choices(), self._generation.usage()
        await self._connection.json(200, self._head | {"choices": choices, "usage": usage})

    async def _stream(self, options: StreamOptions) -> None:
        kind = "chat.completion.chunk" if self._is_chat else self._head["object"]
        head = b"data: " + encode(self._head | {"object": kind})[:-1] + b',"choices":['
        connection, formatter, first = self._connection, self._formatter, True
        async for deltas in self._generation.deltas():
            choices = []
            if first:
                await connection.begin_events()
                choices, first = [*formatter.first_choices()], False
            for delta in deltas:
                choices += formatter.add(delta)
            if choices:
                tail = b"]" + self._usage(options) + b"}\n\n"
                await connection.event(b"".join([head + encode(choice) + tail for choice in choices]))
        last = head + b'],"usage":' + encode(self._generation.usage()) + b"}\n\n" if options.include_usage else b""
        await connection.end_events(last + b"data: [DONE]\n\n")

    def _usage(self, options: StreamOptions) -> bytes:
        """The usage field of every event."""
        if options.continuous_usage_stats:
            return b',"usage":' + bytes(encode(self._generation.usage()))
        return b',"usage":null' if options.include_usage else b""


def _finish_of(problem: Problem) -> str | None:
    """The finish reason that a failed completion counts as; none: it was refused before it began."""
    if problem.code in ("timeout", "aborted"):
        return "deadline" if problem.code == "timeout" else "abort"
    return None if problem.status in (400, 429) and problem.code != "structure_failed" else "error"
