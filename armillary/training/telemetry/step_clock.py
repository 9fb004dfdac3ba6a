"""Pace: how long plain steps take, and what the loop does between them, by the wall clock of the host."""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from statistics import median

QUEUE = Path("/proc/thread-self/schedstat")
"""Linux: nanoseconds that a thread ran, nanoseconds that it waited for a core, turns"""
_REMEMBERED = 5
"""plain steps that a recorded one is held against"""


class Pace:
    """`come()` when a step begins, `leave()` when it ends; `aside(seconds)` for what is measured by itself."""

    def __init__(self) -> None:
        self._left: float | None = None
        self._aside = 0.0
        self._plain: deque[float] = deque(maxlen=_REMEMBERED)
        self._between: float | None = None

    def come(self) -> None:
        """A step begins: what passed since the last one's end, validation and checkpoints left out, was the loop's."""
        now = time.perf_counter()
        self._between = None if self._left is None else max(0.0, now - self._left - self._aside)
        self._aside = 0.0

    def aside(self, seconds: float) -> None:
        self._aside += seconds

    def leave(self, seconds: float, *, plain: bool) -> None:
        """A step ends after `seconds` of work; `plain`: nobody looked at it while it ran."""
        if plain:
            self._plain.append(seconds)
        self._left = time.perf_counter()

    @property
    def plain_s(self) -> float | None:
        """What a step takes when nobody looks."""
        return median(self._plain) if self._plain else None

    def gauges(self, tail_s: float = 0.0) -> dict[str, float]:
        """`tail_s`: how long a device still worked on the step before, which hides as much of the loop."""
        return {} if self._between is None else {"between_steps_s": max(0.0, self._between - tail_s)}


def queued_s() -> float:
    """Seconds that this thread was ready to run while another one ran; always 0 where the system does not say."""
    try:
        return int(QUEUE.read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def spread(each: tuple[float, ...]) -> dict[str, float]:
    """How far the slowest of all ranks is behind the median one, from each one's own work; nothing where one of them
    has no figure."""
    if len(each) < 2 or min(each) <= 0:
        return {}
    slowest = max(range(len(each)), key=lambda rank: each[rank])
    middle = sorted(each)[(len(each) - 1) // 2]
    return {"rank_spread_s": each[slowest] - middle, "slowest_rank": float(slowest)}
