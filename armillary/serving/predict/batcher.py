"""Dynamic batching: waiting rows run together, up to a batch size, after a delay at most.

One batch runs at a time. Rows that arrive while it runs form the next batch, which starts when the model is free. The
delay applies only while the model is idle and a batch is incomplete. A batch of a preferred size starts at once.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from armillary.serving.predict.request import PredictRequest

Arrays = list[np.ndarray[Any, Any]]
Run = Callable[[Arrays], Arrays]


class QueueFull(Exception):
    """The queue is full; the client should try again later."""


class BatcherClosed(Exception):
    """Another version has replaced this one and serves new requests."""


@dataclass(frozen=True, kw_only=True)
class BatchLimits:
    """Limits of a batch in rows; `max_delay_s` is the longest wait of its first row."""

    max_batch: int
    max_delay_s: float
    max_queue: int
    preferred: tuple[int, ...] = ()
    """batch sizes that start at once, and to which a longer queue is split"""
    fixed_rows: int | None = None
    """the model takes exactly this many rows; batches are padded"""


@dataclass(eq=False)
class QueuedRequest:
    """A request in the queue."""

    request: PredictRequest
    done: asyncio.Future[Arrays]
    since: float = field(default_factory=time.monotonic)


BatchObserver = Callable[[int, float, float], None]
"""called per batch: rows, wait of its first row in seconds, run time in seconds"""


class Batcher:
    """The queue of one model and the thread that runs it."""

    def __init__(self, run: Run, limits: BatchLimits, observe: BatchObserver = lambda rows, waited, ran: None) -> None:
        self._run, self.limits, self._observe = run, limits, observe
        self._queue: deque[QueuedRequest] = deque()
        self.waiting_rows = 0
        self._arrived = asyncio.Event()
        self._closing = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="predict")
        self._task: asyncio.Task[None] | None = None
        self.running_since: float | None = None

    async def submit(self, request: PredictRequest) -> Arrays:
        """The outputs of a request; QueueFull or BatcherClosed where it is not accepted."""
        if self._closing:
            raise BatcherClosed
        if self.waiting_rows + request.rows > self.limits.max_queue:
            raise QueueFull
        if self._task is None:
            self._task = asyncio.create_task(self._work())
        queued = QueuedRequest(request=request, done=asyncio.get_running_loop().create_future())
        self._queue.append(queued)
        self.waiting_rows += request.rows
        self._arrived.set()
        return await queued.done

    async def close(self) -> None:
        """Run the queue empty without delay, then end."""
        self._closing = True
        self._arrived.set()
        while self._queue or self.running_since is not None:
            self._drop_cancelled()
            await asyncio.sleep(0.002)
        if self._task:
            self._task.cancel()
        self._thread.shutdown(wait=False)

    # --- inside

    async def _work(self) -> None:
        while True:
            await self._wait_until_due()
            batch = self._take()
            if batch:
                self.running_since = time.monotonic()
                await self._run_batch(batch)
                self.running_since = None

    async def _wait_until_due(self) -> None:
        """Wait until a batch is complete or its first row has waited max_delay_s."""
        while True:
            self._arrived.clear()
            self._drop_cancelled()
            if self._queue:
                left = self._queue[0].since + self.limits.max_delay_s - time.monotonic()
                if left <= 0 or self._closing or self._complete():
                    return
            else:
                left = None
            try:
                await asyncio.wait_for(self._arrived.wait(), left)
            except TimeoutError:
                return

    def _complete(self) -> bool:
        rows = self._matching_rows()
        return rows >= self.limits.max_batch or rows in self.limits.preferred

    def _matching_rows(self) -> int:
        """Rows that fit into a batch with the first request."""
        key = self._queue[0].request.key
        return sum(queued.request.rows for queued in self._queue if queued.request.key == key)

    def _drop_cancelled(self) -> None:
        """Remove requests whose client has disconnected or whose time is over."""
        for queued in [queued for queued in self._queue if queued.done.done()]:
            self._queue.remove(queued)
            self.waiting_rows -= queued.request.rows

    def _take(self) -> list[QueuedRequest]:
        """The oldest request and those that fit its batch: up to the batch size, or to the largest preferred size that
        they fill."""
        self._drop_cancelled()
        if not self._queue:
            return []
        key, most = self._queue[0].request.key, min(self._matching_rows(), self.limits.max_batch)
        size = max((size for size in self.limits.preferred if size <= most), default=most)
        taken: list[QueuedRequest] = []
        left: deque[QueuedRequest] = deque()
        rows = 0
        for queued in self._queue:
            fits = queued.request.key == key and (not taken or rows + queued.request.rows <= size)
            (taken if fits else left).append(queued)
            rows += queued.request.rows if fits else 0
        self._queue, self.waiting_rows = left, self.waiting_rows - rows
        return taken

    async def _run_batch(self, batch: list[QueuedRequest]) -> None:
        begin, rows = time.monotonic(), sum(queued.request.rows for queued in batch)
        results = await asyncio.get_running_loop().run_in_executor(self._thread, self._results, batch)
        self._observe(rows, begin - batch[0].since, time.monotonic() - begin)
        for queued, result in zip(batch, results, strict=True):
            if queued.done.done():
                continue
            if isinstance(result, Exception):
                queued.done.set_exception(result)
            else:
                queued.done.set_result(result)

    def _results(self, batch: list[QueuedRequest]) -> list[Arrays | Exception]:
        """In the thread: outputs per request; the requests of a failed batch run alone, so that one cannot fail the
        others."""
        try:
            return list(self._run_together([queued.request for queued in batch]))
        except Exception as error:  # a model may raise anything
            if len(batch) == 1:
                return [error]
            return [self._results([queued])[0] for queued in batch]

    def _run_together(self, batch: list[PredictRequest]) -> list[Arrays]:
        counts = [request.rows for request in batch]
        columns = zip(*(request.arrays for request in batch), strict=True)
        joined = [column[0] if len(column) == 1 else np.concatenate(column) for column in columns]
        outputs = self._run_batches(joined, sum(counts))
        if len(batch) == 1:
            return [outputs]
        edges = np.cumsum(counts)[:-1]
        parts = [np.split(output, edges) for output in outputs]
        return [[part[i] for part in parts] for i in range(len(batch))]

    def _run_batches(self, arrays: Arrays, rows: int) -> Arrays:
        """Run a request larger than a batch in several batches; the last one is padded to a fixed size."""
        fixed = self.limits.fixed_rows
        size = fixed or max(self.limits.max_batch, 1)
        if fixed is None and rows <= size:
            return self._run(arrays)
        results = []
        for begin in range(0, rows, size):
            part = [array[begin : begin + size] for array in arrays]
            count = len(part[0])
            if fixed and count < fixed:
                part = [np.concatenate([array, np.repeat(array[-1:], fixed - count, axis=0)]) for array in part]
            results.append([output[:count] for output in self._run(part)])
        return [np.concatenate(column) for column in zip(*results, strict=True)]
