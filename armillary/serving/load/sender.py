"""Sends the requests of a test: open loop, each at its time whatever the server does; closed loop, each client again
when its answer is complete.

The open loop prepares requests before they are due and never waits for an answer, so a slow server cannot slow the
sending down (coordinated omission).
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from random import Random

import aiohttp

from armillary.serving.load.client import Clock, ask, clock_from, session
from armillary.serving.load.client_lag import LagWatch
from armillary.serving.load.prompts import Texts
from armillary.serving.load.record import Answer, Planned, Shot
from armillary.serving.load.schedule import lengths
from armillary.serving.load.target import Target
from armillary.spec.tables.load import Load
from armillary.spec.tables.serve import Traffic

_TICK_S = 0.25
START_S = 0.05
"""from when all is prepared to the beginning"""
_SLACK_S, _AHEAD = 0.005, 64
"""time that preparing a request may take; requests that are prepared"""
Watch = Callable[[float, int, int, int], None]
"""(seconds since the beginning, requests under way, answers complete, of which failed)"""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What one sending process does; it can be sent to another process."""

    target: Target
    """the server"""
    texts: Texts
    """makes prompts"""
    traffic: Traffic
    """lengths, of a closed loop"""
    load: Load
    """how"""
    rows: tuple[tuple[int, Planned], ...]
    """open loop: (place in the test, request)"""
    clients: int
    """closed loop: how many"""
    first: int
    """closed loop: place of this process's first request"""
    stride: int
    """closed loop: between the places of its requests"""
    warmup_s: float
    """closed loop: requests before it do not count"""
    stop_s: float
    """closed loop: nothing is sent from then on"""
    most: int | None
    """closed loop: requests after the warm-up, at most; none: no limit"""


@dataclass(kw_only=True)
class Driven:
    """What came back."""

    answers: list[Answer] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)
    """how late timers of the loop fired"""
    cpu_fraction: float = 0.0
    """of one core, of the busiest process"""


def drive(job: Job, begin: Callable[[], float] | None = None, watch: Watch | None = None) -> Driven:
    """Run `job`. `begin` is asked when the first requests are prepared, and gives the moment on time.monotonic from
    which times count; none: now."""
    run = _Run(job)
    job.texts.cut(1, Random(0))  # reads the text that prompts are cut from
    run.fill(_AHEAD)
    with _no_pauses():
        run.clock = clock_from(begin() if begin else time.monotonic() + START_S)
        return asyncio.run(_drive(run, watch))


@contextmanager
def _no_pauses() -> Iterator[None]:
    """A full garbage collection can take longer than a gap between tokens; what was there before is left out of it."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


async def _drive(run: _Run, watch: Watch | None) -> Driven:
    job = run.job
    async with session(job.target, job.load.timeout_s) as http, LagWatch() as lag, _beside(run.show(watch)):
        await (run.closed(http) if job.clients else run.open(http))
    return Driven(answers=run.answers, late_s=lag.late, cpu_fraction=lag.cpu_fraction)


@asynccontextmanager
async def _beside(work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Runs `work` while the block does; what it raises is raised."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


class _Run:
    """One run of a job."""

    clock: Clock

    def __init__(self, job: Job) -> None:
        self.job = job
        self.answers: list[Answer] = []
        self.under_way = self.failed = 0
        self._rows, self._ready = iter(job.rows), deque[Shot]()

    async def open(self, http: aiohttp.ClientSession) -> None:
        async with asyncio.TaskGroup() as tasks:
            while self._ready:
                shot = self._ready.popleft()
                assert shot.at_s is not None
                while self.clock() < shot.at_s - _SLACK_S and self.fill(1):
                    await asyncio.sleep(0)  # what has arrived is stamped first
                await _until(shot.at_s, self.clock)
                tasks.create_task(self._one(http, shot, shot.at_s))
                if not self._ready:
                    self.fill(1)

    def fill(self, most: int) -> bool:
        """Prepare up to `most` of the next requests; False where there is nothing to do."""
        rows = list(islice(self._rows, max(0, min(most, _AHEAD - len(self._ready)))))
        self._ready += [self._shot(index, row) for index, row in rows]
        return bool(rows)

    async def closed(self, http: aiohttp.ClientSession) -> None:
        async with asyncio.TaskGroup() as tasks:
            for shots in [self._endless()] * self.job.clients:  # clients take from one stream of requests
                tasks.create_task(self._client(http, shots))

    async def _client(self, http: aiohttp.ClientSession, shots: Iterator[Shot]) -> None:
        await _until(0.0, self.clock)
        for shot in shots:
            due = self.clock()
            if due >= self.job.stop_s:
                return
            await self._one(http, shot, due)

    def _endless(self) -> Iterator[Shot]:
        """The next request, until as many as asked for have been given out after the warm-up."""
        job, counted = self.job, 0
        draw = lengths(job.traffic, job.load, job.texts.seed * job.stride + job.first)
        index = job.first
        while job.most is None or counted < job.most:
            counted += self.clock() >= job.warmup_s
            tokens_in, tokens_out = draw()
            yield self._shot(index, Planned(at_s=None, tokens_in=tokens_in, tokens_out=tokens_out))
            index += job.stride

    def _shot(self, index: int, row: Planned) -> Shot:
        body = self.job.target.body(self.job.texts.prompt(index, row), row.tokens_out)
        return Shot(index=index, at_s=row.at_s, body=body)

    async def _one(self, http: aiohttp.ClientSession, shot: Shot, due_s: float) -> None:
        self.under_way += 1
        try:
            answer = await ask(http, self.job.target, shot, due_s=due_s, clock=self.clock)
        finally:
            self.under_way -= 1
        self.answers.append(answer)
        self.failed += not answer.ok
        if not answer.ok and self.job.clients:
            await asyncio.sleep(0.05)  # a closed loop must not spin on a server that refuses at once

    async def show(self, watch: Watch | None) -> None:
        while watch:
            watch(self.clock(), self.under_way, len(self.answers), self.failed)
            await asyncio.sleep(_TICK_S)


async def _until(at_s: float, clock: Clock) -> None:
    """Sleep to `at_s`; when that has passed, let others run once all the same."""
    await asyncio.sleep(max(0.0, at_s - clock()))
