"""Limits of requests and tokens in a sliding window, exact: no window of the given length ever has more.

Every admitted request is an entry (time, cost) of its window. A request is admitted only if the entries of the last
`window_s` seconds and its own cost fit. Tokens are reserved with their upper bound (prompt and max_tokens), and
corrected to what was used when the response has ended. A refusal says when enough entries will have left the window.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Charge:
    """What a request costs in one window."""

    bucket: str  # key, model and kind of the limit
    cost: int
    limit: int
    window_s: float


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

    def __init__(self) -> None:
        self.entries: deque[tuple[float, str]] = deque()
        self.costs: dict[str, int] = {}
        self.total = 0

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

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._windows = clock, dict[str, Window]()

    async def reserve(self, request: str, charges: Sequence[Charge]) -> Refusal | None:
        now = self._clock()
        windows = [self._windows.setdefault(charge.bucket, Window()) for charge in charges]
        for charge, window in zip(charges, windows, strict=True):
            window.expire(now - charge.window_s)
            needed = window.total + charge.cost - charge.limit
            if needed > 0:
                return Refusal(charge, window.wait_s(needed, now, charge.window_s))
        for charge, window in zip(charges, windows, strict=True):
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
                window.costs[request] = cost
