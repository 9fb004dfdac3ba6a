"""Sends the requests of a test: in an open loop each at its scheduled time, in a closed loop when a client is free.

The open loop prepares requests before they are due and never waits for a response, so that a slow server cannot delay
the sending (coordinated omission).
"""

import asyncio
import gc
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from random import Random

import aiohttp

from armillary.serving.load.client import Clock, clock_from, send_request, session
from armillary.serving.load.client_lag import LagWatch
from armillary.serving.load.prompts import PromptMaker
from armillary.serving.load.record import PlannedRequest, PreparedRequest, RequestResult
from armillary.serving.load.schedule import lengths
from armillary.serving.load.target import Target
from armillary.spec.tables.traffic import Load, Traffic

_TICK_S = 0.25
START_S = 0.05
"""delay between preparation and start"""
_SLACK_S, _PREPARED = 0.005, 64
"""time limit to prepare a request; requests prepared in advance"""
Watch = Callable[[float, int, int, int], None]
"""progress callback: seconds since the start, requests in flight, completed, failed"""


@dataclass(frozen=True, kw_only=True)
class SendJob:
    """The work of one sending process, to which it can be sent. An open loop has rows of (position in the test,
    request). In a closed loop, clients send requests of the lengths of `traffic` at the positions first, first + stride
    …, until `stop_s` or `max_requests` after the warm-up."""

    target: Target
    prompts: PromptMaker
    traffic: Traffic
    load: Load
    rows: tuple[tuple[int, PlannedRequest], ...]
    clients: int
    first: int
    stride: int
    warmup_s: float
    stop_s: float
    max_requests: int | None


@dataclass(kw_only=True)
class SendResult:
    """The results of one sending process, the delays of its event loop's timers, and its fraction of one core."""

    results: list[RequestResult] = field(default_factory=list)
    timer_delays_s: list[float] = field(default_factory=list)
    cpu_fraction: float = 0.0


@asynccontextmanager
async def _background(work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Run `work` during the block; its exception is raised."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


class Sender:
    """One run of a job."""

    clock: Clock

    def __init__(self, job: SendJob) -> None:
        """Prepare the first requests, and exclude existing objects from garbage collection until everything is sent: a
        full collection can take longer than a gap between tokens."""
        self.job = job
        self.results: list[RequestResult] = []
        self.in_flight = self.failed = 0
        self._rows, self._ready = iter(job.rows), deque[PreparedRequest]()
        job.prompts.cut(1, Random(0))  # reads the corpus
        self.fill(_PREPARED)
        gc.collect()
        gc.freeze()

    def send(self, begin: float, watch: Watch | None = None) -> SendResult:
        """Send all requests; `begin` is the start on time.monotonic."""
        self.clock = clock_from(begin)
        try:
            return asyncio.run(self._run(watch))
        finally:
            gc.unfreeze()

    async def _run(self, watch: Watch | None) -> SendResult:
        job = self.job
        async with session(job.target, job.load.timeout_s) as http, LagWatch() as lag, _background(self.show(watch)):
            await (self.closed_loop(http) if job.clients else self.open_loop(http))
        return SendResult(results=self.results, timer_delays_s=lag.timer_delays_s, cpu_fraction=lag.cpu_fraction)

    async def open_loop(self, http: aiohttp.ClientSession) -> None:
        async with asyncio.TaskGroup() as tasks:
            while self._ready:
                request = self._ready.popleft()
                assert request.at_s is not None
                while self.clock() < request.at_s - _SLACK_S and self.fill(1):
                    await asyncio.sleep(0)  # arrived chunks get their time stamps first
                await _until(request.at_s, self.clock)
                tasks.create_task(self._send(http, request, request.at_s))
                if not self._ready:
                    self.fill(1)

    def fill(self, count: int) -> bool:
        """Prepare up to `count` of the next requests; False where none is left or the buffer is full."""
        rows = list(islice(self._rows, max(0, min(count, _PREPARED - len(self._ready)))))
        self._ready += [self._prepare(index, row) for index, row in rows]
        return bool(rows)

    async def closed_loop(self, http: aiohttp.ClientSession) -> None:
        async with asyncio.TaskGroup() as tasks:
            requests = self._requests()  # shared by all clients
            for _ in range(self.job.clients):
                tasks.create_task(self._client(http, requests))

    async def _client(self, http: aiohttp.ClientSession, requests: Iterator[PreparedRequest]) -> None:
        await _until(0.0, self.clock)
        for request in requests:
            now = self.clock()
            if now >= self.job.stop_s:
                return
            await self._send(http, request, now)

    def _requests(self) -> Iterator[PreparedRequest]:
        """The requests of a closed loop, up to max_requests after the warm-up."""
        job, counted = self.job, 0
        draw = lengths(job.traffic, job.load, job.prompts.seed * job.stride + job.first)
        index = job.first
        while job.max_requests is None or counted < job.max_requests:
            counted += self.clock() >= job.warmup_s
            tokens_in, tokens_out = draw()
            yield self._prepare(index, PlannedRequest(at_s=None, tokens_in=tokens_in, tokens_out=tokens_out))
            index += job.stride

    def _prepare(self, index: int, row: PlannedRequest) -> PreparedRequest:
        body = self.job.target.body(self.job.prompts.prompt(index, row), row.tokens_out)
        return PreparedRequest(index=index, at_s=row.at_s, body=body)

    async def _send(self, http: aiohttp.ClientSession, request: PreparedRequest, due_s: float) -> None:
        self.in_flight += 1
        try:
            result = await send_request(http, self.job.target, request, due_s=due_s, clock=self.clock)
        finally:
            self.in_flight -= 1
        self.results.append(result)
        self.failed += not result.ok
        if not result.ok and self.job.clients:
            await asyncio.sleep(0.05)  # a closed loop must not spin on a server that refuses requests at once

    async def show(self, watch: Watch | None) -> None:
        while watch:
            watch(self.clock(), self.in_flight, len(self.results), self.failed)
            await asyncio.sleep(_TICK_S)


async def _until(at_s: float, clock: Clock) -> None:
    """Sleep until `at_s`; a time in the past still lets other tasks run once."""
    await asyncio.sleep(max(0.0, at_s - clock()))
