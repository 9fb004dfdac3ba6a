"""Where the answers to one HTTP request arrive: tokens as the engine's process sends them, in order, until all ended.

The handler of the request takes what has come; nobody waits for it, and it waits for nobody but the engine.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any, NamedTuple


class End(NamedTuple):
    """Why an answer is over."""

    finish: str
    error: str
    gauges: dict[str, float]
    """times and sizes, as the engine saw them"""


class Event(NamedTuple):
    """A token of an answer, or its end."""

    choice: int
    token: int | None = None
    logprob: tuple[Any, ...] | None = None
    """(token, value, likeliest)"""
    end: End | None = None


@dataclass(slots=True)
class _Times:
    """When an answer's tokens came."""

    first: float | None = None
    last: float | None = None
    count: int = 0


class Mailbox:
    """Tokens of all answers to a request, of one or several prompts."""

    def __init__(self, choices: int, *, eager: bool, begin: float | None = None) -> None:
        self.eager = eager
        """wake the reader for every token; else only when all is over"""
        self.begin = time.monotonic() if begin is None else begin
        self.left = choices
        """answers that are not over"""
        self.times = [_Times() for _ in range(choices)]
        self.prompts: dict[int, list[Any]] = {}
        """first choice of a prompt -> log-probabilities of its tokens but the first"""
        self._events: list[Event] = []
        self._problem: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def token(self, choice: int, token: int, logprob: tuple[Any, ...] | None, now: float) -> float | None:
        """One more token; the time since the one before, or none for the first."""
        self._events.append(Event(choice, token, logprob))
        times = self.times[choice]
        before, times.last = times.last, now
        times.count += 1
        if self.eager:
            self._wake()
        if before is None:
            times.first = now
            return None
        return now - before

    def end(self, choice: int, end: End) -> None:
        """One answer is over."""
        self._events.append(Event(choice, end=end))
        self.left -= 1
        if self.eager or not self.left:
            self._wake()

    def fail(self, problem: Exception) -> None:
        """Nothing more will come."""
        self._problem, self.left = problem, 0
        self._wake()

    async def take(self) -> list[Event]:
        """What has come since the last time, at least one event; what went wrong is raised after what came before."""
        while not self._ready():
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        events, self._events = self._events, []
        if not events and self._problem is not None:
            raise self._problem
        return events

    def _ready(self) -> bool:
        if self._problem is not None or (self._events and (self.eager or not self.left)):
            return True
        assert self.left, "everything has been taken"
        return False

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
