"""Requests of one model that wait for a free slot at its replicas, shared fairly between clients.

A free slot goes to the lowest priority number first; a minute of waiting counts as one level, so nobody starves.
Within a level it goes to the client that has the fewest requests in flight for its weight, then to the one
with the earlier virtual time (start-time fair queueing: each request moves its client's on by 1/weight). The queue is
bounded: where it is full, the client with the most waiting requests loses its newest.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from armillary.serving.http.problem import Problem

AGEING_S = 60.0
"""waiting time that counts as one level of priority, as the scheduler's serve.ageing_s"""
_MOST_TIMES = 10_000


@dataclass(frozen=True, kw_only=True)
class Share:
    """Whose request it is."""

    client: str
    weight: float = 1.0
    priority: int = 0


@dataclass(eq=False, slots=True)
class Waiting:
    """A request that waits."""

    share: Share
    arrived: float
    granted: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class FairQueue:
    """Slots of one model."""

    def __init__(
        self, slots: int, *, max_waiting: int, max_wait_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._free, self._max_waiting, self._max_wait_s, self._clock = slots, max_waiting, max_wait_s, clock
        self._in_flight: Counter[str] = Counter()
        self._virtual_time, self._virtual_times = (
            0.0,
            dict[str, float](),
        )  # of the last grant, and of each client's next request
        self._waiting: dict[str, deque[Waiting]] = {}
        self.num_waiting = self.refused = 0

    def take(self, share: Share) -> bool:
        """A slot at once; False where the request has to wait."""
        if self._free < 1 or self.num_waiting:
            return False
        self._grant(share)
        return True

    async def wait(self, share: Share) -> None:
        """A slot, as soon as it is this request's turn; Problem 429 or 503 where it does not get one."""
        self._make_space(share)
        waiting = Waiting(share, self._clock())
        self._waiting.setdefault(share.client, deque()).append(waiting)
        self.num_waiting += 1
        self._grant_next()
        try:
            async with asyncio.timeout(self._max_wait_s):
                await waiting.granted
        except TimeoutError:
            self._leave(waiting)
            self.refused += 1
            text = f"no replica was free for {self._max_wait_s:g} s; try again later"
            raise Problem(503, text, code="overloaded", retry_after_s=5) from None
        except asyncio.CancelledError:
            self._leave(waiting)
            raise

    def release(self, share: Share) -> None:
        """A request has ended."""
        self._free += 1
        self._in_flight[share.client] -= 1
        if not self._in_flight[share.client]:
            del self._in_flight[share.client]
        self._grant_next()

    def _grant(self, share: Share) -> None:
        self._free -= 1
        self._in_flight[share.client] += 1
        self._virtual_time = self._virtual_time_of(share)
        self._virtual_times[share.client] = self._virtual_time + 1.0 / share.weight
        if len(self._virtual_times) > _MOST_TIMES:  # an earlier time than the last grant says nothing
            self._virtual_times = {client: at for client, at in self._virtual_times.items() if at > self._virtual_time}

    def _virtual_time_of(self, share: Share) -> float:
        return max(self._virtual_time, self._virtual_times.get(share.client, 0.0))

    def _grant_next(self) -> None:
        while self._free > 0 and self.num_waiting:
            waiting = min((queue[0] for queue in self._waiting.values()), key=self._order)
            self._remove(waiting)
            if not waiting.granted.done():  # its client left in this moment
                self._grant(waiting.share)
                waiting.granted.set_result(None)

    def _order(self, waiting: Waiting) -> tuple[float, ...]:
        share, waited_s = waiting.share, self._clock() - waiting.arrived
        in_flight = self._in_flight[share.client] / share.weight
        return share.priority - waited_s // AGEING_S, in_flight, self._virtual_time_of(share), waiting.arrived

    def _make_space(self, share: Share) -> None:
        """Refuse this request, or the newest of the client that has the most waiting, where the queue is full."""
        if self.num_waiting < self._max_waiting:
            return
        self.refused += 1
        newest = max((queue[-1] for queue in self._waiting.values()), key=self._excess, default=None)
        own = (share.priority, (len(self._waiting.get(share.client, ())) + 1) / share.weight)
        text = f"{self.num_waiting:,} requests wait, the most that are accepted; try again later"
        problem = Problem(429, text, code="rate_limit_exceeded", retry_after_s=2)
        if newest is None or own >= self._excess(newest):
            raise problem
        self._remove(newest)
        if not newest.granted.done():
            newest.granted.set_exception(problem)

    def _excess(self, waiting: Waiting) -> tuple[int, float]:
        share = waiting.share
        return share.priority, len(self._waiting[share.client]) / share.weight

    def _leave(self, waiting: Waiting) -> None:
        """A request that waits no more; one that was granted its slot in this moment gives it back."""
        if waiting.granted.done() and not waiting.granted.cancelled() and waiting.granted.exception() is None:
            self.release(waiting.share)
        elif waiting in self._waiting.get(waiting.share.client, ()):
            self._remove(waiting)

    def _remove(self, waiting: Waiting) -> None:
        queue = self._waiting[waiting.share.client]
        queue.remove(waiting)
        self.num_waiting -= 1
        if not queue:
            del self._waiting[waiting.share.client]
