"""Limits of requests and tokens in a sliding window, exact: no window of the given length ever has more.

Every admitted request is an entry (time, cost) of its window. A request is admitted only if the entries of the last
`window_s` seconds and its own cost fit. Tokens are reserved with their upper bound (prompt and max_tokens), and
corrected to what was used when the response has ended. A refusal says when enough entries will have left the window.
A budget is a sum that begins at zero with each day or month.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Charge:
    """What a request costs in one window."""

    bucket: str  # key, model and kind of the limit
    cost: int
    limit: int
    window_s: float
    ends_at: float | None = None  # of a budget: the end (unix seconds) of its day or month, which does not slide


@dataclass(frozen=True, slots=True)
class Refusal:
    """Which limit refused a request, and when the same request would fit."""

    charge: Charge
    retry_after_s: float


class Limiter(Protocol):
    """Admits requests; one for all requests of a gateway."""

    async def reserve(self, request: str, charges: Sequence[Charge]) -> Refusal | None:
        """Enter the request into all windows, or into none where one refuses."""

    async def correct(self, request: str, charges: Sequence[Charge], costs: Sequence[int]) -> None:
        """Replace the costs of a request by what it used; never by more than it reserved."""


class Window:
    """The entries of one bucket, in order of time."""

    __slots__ = ("costs", "entries", "total")

    def __init__(self, total: int = 0) -> None:
        self.entries: deque[tuple[float, str]] = deque()  # none for a budget, whose requests never leave
        self.costs: dict[str, int] = {}
        self.total = total

    def expire(self, before: float) -> None:
        while self.entries and self.entries[0][0] <= before:
            _, request = self.entries.popleft()
            self.total -= self.costs.pop(request)

    def wait_s(self, needed: int, now: float, window_s: float) -> float:
        """Time until entries that cost `needed` have left."""
        for at, request in self.entries:
            needed -= self.costs[request]
            if needed <= 0:
                return max(0.0, at + window_s - now)
        return window_s


class LocalLimiter:
    """Windows in the memory of this process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, totals: Mapping[str, int] | None = None) -> None:
        """`totals`: what was spent of budgets before, by bucket."""
        self._clock, self._windows = clock, dict[str, Window]()
        for bucket, total in (totals or {}).items():
            self._windows[bucket] = Window(total)

    async def reserve(self, request: str, charges: Sequence[Charge]) -> Refusal | None:
        now = self._clock()
        windows = [self._windows.setdefault(charge.bucket, Window()) for charge in charges]
        for charge, window in zip(charges, windows, strict=True):
            if charge.ends_at is None:
                window.expire(now - charge.window_s)
            needed = window.total + charge.cost - charge.limit
            if needed > 0:
                return Refusal(charge, _wait_s(charge, window, needed, now))
        for charge, window in zip(charges, windows, strict=True):
            if charge.ends_at is None:
                window.entries.append((now, request))
            window.costs[request] = charge.cost
            window.total += charge.cost
        return None

    async def correct(self, request: str, charges: Sequence[Charge], costs: Sequence[int]) -> None:
        for charge, cost in zip(charges, costs, strict=True):
            window = self._windows.get(charge.bucket)
            if window is not None and request in window.costs:
                cost = min(cost, window.costs[request])
                window.total += cost - window.costs[request]
                if charge.ends_at is None:
                    window.costs[request] = cost
                else:  # only the sum of a budget is needed
                    del window.costs[request]

    def spent(self, bucket: str) -> int:
        """Of a budget, what is reserved included."""
        window = self._windows.get(bucket)
        return window.total if window is not None else 0


def _wait_s(charge: Charge, window: Window, needed: int, now: float) -> float:
    if charge.ends_at is not None:
        return max(0.0, charge.ends_at - time.time())
    return window.wait_s(needed, now, charge.window_s)
