"""Looks: which steps are recorded by the profiler, and what they told.

Three early ones, when everything is warm, then one every so many steps: a single look would be ruled by whatever else
the machine did in that moment, and a short run would have none.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from armillary.profiling.profile import Roof
from armillary.training.telemetry.profiled_step import recorded

T = TypeVar("T")
Timed = tuple[T, float]
"""something, and the seconds it took"""
FIRST = (7, 9, 11)
"""of the steps this process takes: those that are recorded however seldom others are"""
FIRST_S = 4.0
"""seconds that analysing the first ones may take: after that one more is not worth them"""


class Looks:
    """`due(step)`, then `at(work)` in place of calling it."""

    def __init__(self, every: int, roof: Roof) -> None:
        """`every` so many steps one is recorded; 0: none at all."""
        self._every, self._roof, self._spent_s = every, roof, 0.0

    def due(self, step: int, taken: int) -> bool:
        """Whether step `step`, before which this process took `taken`, is recorded."""
        early = taken in FIRST and self._spent_s < FIRST_S
        return bool(self._every) and ((step + 1) % self._every == 0 or early)

    def at(self, work: Callable[[], Timed[T]], plain_s: float | None) -> tuple[Timed[T], dict[str, float]]:
        """What `work` gives, and how its seconds were spent; `plain_s` is what it takes when nobody looks."""
        begin = time.perf_counter()
        made, parts = recorded(work, self._roof, plain_s)
        self._spent_s += time.perf_counter() - begin - made[1]
        return made, parts
