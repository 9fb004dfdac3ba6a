"""Dynamic batching: rows that wait are run together, up to a size, after a delay at most.

One batch runs at a time. Rows that come while it runs form the next one, which is taken as soon as the model is free;
the delay is only spent when the model is idle and a batch is not complete. A preferred size is run at once.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from armillary.serving.predict.request import Asked

Arrays = list[np.ndarray[Any, Any]]
Run = Callable[[Arrays], Arrays]


class Full(Exception):
    """The queue has no room; the client is to try again later."""


class Closed(Exception):
    """Another version has taken over: ask that one."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a batch may be."""

    max_batch: int
    """rows at most"""
    max_delay_s: float
    """wait of the first row at most"""
    max_queue: int
    """rows that wait at most"""
    preferred: tuple[int, ...] = ()
    """sizes to run at once and to cut to"""
    fixed_rows: int | None = None
    """the model takes exactly so many rows; batches are filled up"""


@dataclass(eq=False)
class Waiting:
    """A request in the queue."""

    asked: Asked
    done: asyncio.Future[Arrays]
    since: float = field(default_factory=time.monotonic)


Note = Callable[[int, float, float], None]
"""told of every batch: rows, seconds its first row waited, seconds it ran"""


class Batcher:
    """The queue of one model and the thread that runs it."""

    def __init__(self, run: Run, limits: Limits, note: Note = lambda rows, waited, ran: None) -> None:
        self._run, self.limits, self._note = run, limits, note
        self._queue: deque[Waiting] = deque()
        self._rows = 0
        self._came = asyncio.Event()
        self._closing = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="predict")
        self._task: asyncio.Task[None] | None = None
        self.running_since: float | None = None

    @property
    def waiting_rows(self) -> int:
        return self._rows

    async def submit(self, asked: Asked) -> Arrays:
        """The outputs for these rows; Full where the queue is, Closed where this one takes no more."""
        if self._closing:
            raise Closed
        if self._rows + asked.rows > self.limits.max_queue:
            raise Full
        if self._task is None:
            self._task = asyncio.create_task(self._work())
        waiting = Waiting(asked=asked, done=asyncio.get_running_loop().create_future())
        self._queue.append(waiting)
        self._rows += asked.rows
        self._came.set()
        return await waiting.done

    async def close(self) -> None:
        """Let what is queued finish at once, then end."""
        self._closing = True
        self._came.set()
        while self._queue or self.running_since is not None:
            self._drop_gone()
            await asyncio.sleep(0.002)
        if self._task:
            self._task.cancel()
        self._thread.shutdown(wait=False)

    # --- inside

    async def _work(self) -> None:
        while True:
            await self._until_due()
            batch = self._take()
            if batch:
                self.running_since = time.monotonic()
                await self._run_batch(batch)
                self.running_since = None

    async def _until_due(self) -> None:
        """Until a batch is complete, or its first row has waited long enough."""
        while True:
            self._came.clear()
            self._drop_gone()
            if self._queue:
                left = self._queue[0].since + self.limits.max_delay_s - time.monotonic()
                if left <= 0 or self._closing or self._complete():
                    return
            else:
                left = None
            try:
                await asyncio.wait_for(self._came.wait(), left)
            except TimeoutError:
                return

    def _complete(self) -> bool:
        rows = self._alike()
        return rows >= self.limits.max_batch or rows in self.limits.preferred

    def _alike(self) -> int:
        """Rows that could go with the first."""
        key = self._queue[0].asked.key
        return sum(one.asked.rows for one in self._queue if one.asked.key == key)

    def _drop_gone(self) -> None:
        """Requests whose client has gone, or whose time is over, are not run."""
        gone = [one for one in self._queue if one.done.done()]
        for one in gone:
            self._queue.remove(one)
            self._rows -= one.asked.rows

    def _take(self) -> list[Waiting]:
        """The oldest request and those that go with it, up to the largest size that is wanted."""
        self._drop_gone()
        if not self._queue:
            return []
        key, most = self._queue[0].asked.key, self._size(self._alike())
        taken: list[Waiting] = []
        left: deque[Waiting] = deque()
        rows = 0
        for one in self._queue:
            fits = one.asked.key == key and (not taken or rows + one.asked.rows <= most)
            (taken if fits else left).append(one)
            rows += one.asked.rows if fits else 0
        self._queue, self._rows = left, self._rows - rows
        return taken

    def _size(self, rows: int) -> int:
        """Rows to run of `rows` that are there: all, but a preferred size where one is complete."""
        rows = min(rows, self.limits.max_batch)
        return max((size for size in self.limits.preferred if size <= rows), default=rows)

    async def _run_batch(self, batch: list[Waiting]) -> None:
        begin, rows = time.monotonic(), sum(one.asked.rows for one in batch)
        found = await asyncio.get_running_loop().run_in_executor(self._thread, self._results, batch)
        self._note(rows, begin - batch[0].since, time.monotonic() - begin)
        for one, result in zip(batch, found, strict=True):
            if one.done.done():
                continue
            if isinstance(result, Exception):
                one.done.set_exception(result)
            else:
                one.done.set_result(result)

    def _results(self, batch: list[Waiting]) -> list[Arrays | Exception]:
        """In the thread: outputs of each; where a batch fails, its requests are tried alone, so that one cannot spoil
        the others."""
        try:
            return list(self._together([one.asked for one in batch]))
        except Exception as error:  # whatever a model raises belongs to its request
            if len(batch) == 1:
                return [error]
            return [self._results([one])[0] for one in batch]

    def _together(self, batch: list[Asked]) -> list[Arrays]:
        counts = [asked.rows for asked in batch]
        columns = zip(*(asked.arrays for asked in batch), strict=True)
        joined = [column[0] if len(column) == 1 else np.concatenate(column) for column in columns]
        outputs = self._in_pieces(joined, sum(counts))
        if len(batch) == 1:
            return [outputs]
        edges = np.cumsum(counts)[:-1]
        parts = [np.split(output, edges) for output in outputs]
        return [[part[i] for part in parts] for i in range(len(batch))]

    def _in_pieces(self, arrays: Arrays, rows: int) -> Arrays:
        """A request larger than a batch is run in several; of a fixed size, the last piece is filled up."""
        fixed = self.limits.fixed_rows
        size = fixed or max(self.limits.max_batch, 1)
        if fixed is None and rows <= size:
            return self._run(arrays)
        found = []
        for begin in range(0, rows, size):
            piece = [array[begin : begin + size] for array in arrays]
            count = len(piece[0])
            if fixed and count < fixed:
                piece = [np.concatenate([array, np.repeat(array[-1:], fixed - count, axis=0)]) for array in piece]
            found.append([output[:count] for output in self._run(piece)])
        return [np.concatenate(column) for column in zip(*found, strict=True)]
