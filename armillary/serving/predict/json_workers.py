"""JSON of large requests and responses in worker processes, because the json module holds the GIL.

`python -m armillary.serving.predict.json_workers FD` is a worker; numbers travel as arrays, which is cheap.
"""

import asyncio
import json
import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from armillary.serving.predict.kserve import decode_infer, encode_infer
from armillary.serving.predict.request import InvalidRequest, PredictRequest, parse, read, response_table
from armillary.serving.predict.schema import Schema
from armillary.serving.processes.worker_process import WorkerProcess, serve_messages

T = TypeVar("T")
_PROCESSES = 2
LARGE_BODY = 64_000
"""bytes that take about a millisecond to decode"""
LARGE_RESPONSE = 4_000
"""numbers that take about a millisecond to encode"""


class WorkerLost(Exception):
    """A worker died on a request."""


def decode_request(body: bytes, schema: Schema, max_rows: int) -> PredictRequest:
    """A request as arrays; InvalidRequest where it does not fit."""
    return read(parse(body), schema, max_rows=max_rows)


def encode_response(request: PredictRequest, outputs: list[np.ndarray[Any, Any]], schema: Schema) -> bytes:
    """The JSON of a response without its latency."""
    return json.dumps(response_table(request, outputs, schema), separators=(",", ":"), allow_nan=False).encode()


@dataclass(frozen=True, kw_only=True)
class WireFormat:
    """How a path writes requests and responses; both functions run in a worker where they are large."""

    decode: Callable[[bytes, Schema, int], PredictRequest]
    encode: Callable[[Any, list[np.ndarray[Any, Any]], Schema], bytes]
    invalid: int = 422  # status of a request that does not fit
    latency: bool = True  # whether a response ends with its own time


PREDICT = WireFormat(decode=decode_request, encode=encode_response)
KSERVE = WireFormat(decode=decode_infer, encode=encode_infer, invalid=400, latency=False)


class JsonPool:
    """Decodes and encodes small JSON in this process and large JSON in workers."""

    def __init__(self, processes: int = _PROCESSES) -> None:
        self._threads = ThreadPoolExecutor(processes, thread_name_prefix="json")
        self.workers = [WorkerProcess("armillary.serving.predict.json_workers") for _ in range(processes)]
        self._free: queue.SimpleQueue[WorkerProcess] = queue.SimpleQueue()
        for worker in self.workers:
            self._free.put(worker)

    async def read(self, body: bytes, schema: Schema, *, max_rows: int, wire: WireFormat = PREDICT) -> PredictRequest:
        work = partial(wire.decode, body, schema, max_rows)
        return work() if len(body) <= LARGE_BODY else await self._in_worker(work)

    async def write(
        self,
        request: PredictRequest,
        outputs: list[np.ndarray[Any, Any]],
        schema: Schema,
        wire: WireFormat = PREDICT,
    ) -> bytes:
        work = partial(wire.encode, replace(request, arrays=()), outputs, schema)  # only the request's form is needed
        return work() if sum(output.size for output in outputs) <= LARGE_RESPONSE else await self._in_worker(work)

    def close(self) -> None:
        """End the workers, once no request is in flight."""
        self._threads.shutdown(wait=True)
        for worker in self.workers:
            worker.close()

    async def _in_worker(self, work: Callable[[], T]) -> T:
        reply: T | InvalidRequest = await asyncio.get_running_loop().run_in_executor(self._threads, self._ask, work)
        if isinstance(reply, InvalidRequest):
            raise reply
        return reply

    def _ask(self, work: Callable[[], Any]) -> Any:
        """In a thread, with a worker that no other thread has."""
        worker = self._free.get()
        try:
            reply = worker.ask(work)
            if reply is None:
                raise WorkerLost
            return reply
        finally:
            self._free.put(worker)


def _reply(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except InvalidRequest as error:
        return error


if __name__ == "__main__":
    serve_messages(_reply)
