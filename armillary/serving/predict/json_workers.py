"""Large requests and answers, read and written in processes of their own: JSON holds the interpreter while it is at it.

`python -m armillary.serving.predict.json_workers FD` is such a process; numbers travel as arrays, which takes no time.
"""

from __future__ import annotations

import asyncio
import json
import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from armillary.serving.predict.request import Asked, Unfit, parse, read, reply
from armillary.serving.predict.schema import Schema
from armillary.serving.processes.worker_process import Child, answer_all

_PROCESSES = 2
LARGE_BODY = 64_000
"""bytes: reading them takes about a millisecond"""
LARGE_ANSWER = 4_000
"""numbers: writing them takes as long"""


class Lost(Exception):
    """A process that died over a request."""


def asked_of(body: bytes, schema: Schema, most_rows: int) -> Asked:
    """A request in arrays; Unfit where it is none."""
    return read(parse(body), schema, most_rows=most_rows)


def text_of(asked: Asked, outputs: list[np.ndarray[Any, Any]], schema: Schema) -> bytes:
    """The JSON of an answer but for its latency."""
    return json.dumps(reply(asked, outputs, schema), separators=(",", ":"), allow_nan=False).encode()


_DONE: dict[str, Callable[..., Any]] = {"read": asked_of, "write": text_of}


class Desk:
    """Reads and writes on the spot what is small, and has the rest done elsewhere."""

    def __init__(self, processes: int = _PROCESSES) -> None:
        self._threads = ThreadPoolExecutor(processes, thread_name_prefix="large")
        self.children = [Child("armillary.serving.predict.json_workers") for _ in range(processes)]
        self._free: queue.SimpleQueue[Child] = queue.SimpleQueue()
        for child in self.children:
            self._free.put(child)

    async def read(self, body: bytes, schema: Schema, *, most_rows: int) -> Asked:
        if len(body) <= LARGE_BODY:
            return asked_of(body, schema, most_rows)
        found: Asked = await self._elsewhere("read", body, schema, most_rows)
        return found

    async def write(self, asked: Asked, outputs: list[np.ndarray[Any, Any]], schema: Schema) -> bytes:
        if sum(output.size for output in outputs) <= LARGE_ANSWER:
            return text_of(asked, outputs, schema)
        # of what was asked only its form matters
        bare = Asked(arrays=(), rows=asked.rows, single=asked.single, named=asked.named)
        found: bytes = await self._elsewhere("write", bare, outputs, schema)
        return found

    def close(self) -> None:
        """End the processes; nothing is under way."""
        self._threads.shutdown(wait=True)
        for child in self.children:
            child.close()

    async def _elsewhere(self, *message: Any) -> Any:
        found = await asyncio.get_running_loop().run_in_executor(self._threads, self._ask, message)
        if isinstance(found, Unfit):
            raise found
        return found

    def _ask(self, message: tuple[Any, ...]) -> Any:
        """In a thread, with a child that no other has."""
        child = self._free.get()
        try:
            found = child.ask(message)
            if found is None:
                raise Lost
            return found
        finally:
            self._free.put(child)


def _answer(message: tuple[Any, ...]) -> Any:
    what, *given = message
    try:
        return _DONE[what](*given)
    except Unfit as error:
        return error


if __name__ == "__main__":
    answer_all(_answer)
