"""The mailbox of one HTTP request: tokens of its choices in order, as the engine's process sends them.

The request's handler takes them when it is ready; the client of the engine never waits for a handler.
"""

import asyncio
import time
from dataclasses import dataclass
from typing import Any, NamedTuple


class FinishEvent(NamedTuple):
    """The end of a sequence."""

    finish: str
    error: str
    gauges: dict[str, float]


class TokenEvent(NamedTuple):
    """A token of a choice with its (token, log-probability, top tokens), or the choice's end."""

    choice: int
    token: int | None = None
    logprob: tuple[Any, ...] | None = None
    end: FinishEvent | None = None


@dataclass(slots=True)
class _Times:
    """Arrival times of a choice's tokens."""

    first: float | None = None
    last: float | None = None
    count: int = 0


class Mailbox:
    """Tokens of all choices of a request, of one or several prompts."""

    def __init__(self, choices: int, *, eager: bool, begin: float | None = None) -> None:
        """`eager`: wake the handler for every token, rather than only when all choices have ended."""
        self.eager = eager
        self.begin = time.monotonic() if begin is None else begin
        self.left = choices
        self.times = [_Times() for _ in range(choices)]
        # first choice of a prompt -> log-probabilities of the prompt's tokens from the second on
        self.prompts: dict[int, list[Any]] = {}
        self.pooled: dict[int, bytes] = {}  # choice -> vector of its prompt, as 32-bit floats
        self._events: list[TokenEvent] = []
        self._problem: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def token(self, choice: int, token: int, logprob: tuple[Any, ...] | None, now: float) -> float | None:
        """Add a token; the time since the previous one, or none for the first."""
        self._events.append(TokenEvent(choice, token, logprob))
        times = self.times[choice]
        before, times.last = times.last, now
        times.count += 1
        if self.eager:
            self._wake()
        if before is None:
            times.first = now
            return None
        return now - before

    def end(self, choice: int, end: FinishEvent) -> None:
        self._events.append(TokenEvent(choice, end=end))
        self.left -= 1
        if self.eager or not self.left:
            self._wake()

    def fail(self, problem: Exception) -> None:
        """No more events will come."""
        self._problem, self.left = problem, 0
        self._wake()

    async def take(self) -> list[TokenEvent]:
        """The events since the last call, at least one; a problem is raised after the events before it."""
        while self._problem is None and not (self._events and (self.eager or not self.left)):
            assert self.left, "everything has been taken"
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        events, self._events = self._events, []
        if not events and self._problem is not None:
            raise self._problem
        return events

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
