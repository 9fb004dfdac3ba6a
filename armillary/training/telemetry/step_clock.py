"""Timers of a step: host time of the step and of the loop between two steps, and device time of recompute."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from armillary.parallel.timers import ExposedWaits

SCHEDSTAT = Path("/proc/thread-self/schedstat")
"""Linux: nanoseconds that a thread ran, nanoseconds that it waited for a core, time slices"""
_WINDOW = 5
"""unprofiled steps whose median a profiled one is compared with"""


class StepClock:
    """`start()` and `stop()` around a step; `exclude(seconds)` for time between steps that has its own gauge."""

    def __init__(self) -> None:
        self._started = 0.0
        self._stopped: float | None = None
        self._excluded = 0.0
        self._seconds: deque[float] = deque(maxlen=_WINDOW)
        self._between: float | None = None

    def start(self) -> None:
        """Time since the last `stop()`, less what was excluded, was spent in the loop."""
        self._started = time.perf_counter()
        self._between = None if self._stopped is None else max(0.0, self._started - self._stopped - self._excluded)
        self._excluded = 0.0

    def since_start(self) -> float:
        return time.perf_counter() - self._started

    def exclude(self, seconds: float) -> None:
        self._excluded += seconds

    def stop(self, seconds: float, *, undisturbed: bool) -> None:
        """A step ends after `seconds` of work; `undisturbed`: neither profiler nor memory tracker slowed it."""
        if undisturbed:
            self._seconds.append(seconds)
        self._stopped = time.perf_counter()

    @property
    def unprofiled_s(self) -> float | None:
        """Median of the last undisturbed steps."""
        return median(self._seconds) if self._seconds else None

    def gauges(self, overrun_s: float = 0.0) -> dict[str, float]:
        """`overrun_s` is how long the device still ran the previous step, which hides as much of the loop's time."""
        return {} if self._between is None else {"between_steps_s": max(0.0, self._between - overrun_s)}


def queued_s() -> float:
    """Seconds that this thread was ready to run and waited for a core; 0 where the system does not count them."""
    try:
        return int(SCHEDSTAT.read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def rank_spread(work_s: Sequence[float], data_s: Sequence[float] = ()) -> dict[str, float]:
    """How far the slowest rank is behind the median rank, from the work time of each, and how much longer than the
    median rank it waited for its rows; nothing where one is unknown."""
    if len(work_s) < 2 or min(work_s) <= 0:
        return {}
    slowest = max(range(len(work_s)), key=lambda rank: work_s[rank])
    middle = sorted(work_s)[(len(work_s) - 1) // 2]
    spread = {"rank_spread_s": work_s[slowest] - middle, "slowest_rank": float(slowest)}
    if len(data_s) != len(work_s):
        return spread
    return spread | {"slowest_rank_data_s": max(0.0, data_s[slowest] - sorted(data_s)[(len(data_s) - 1) // 2])}


class RecomputeTimer:
    """`with timed(): …` around a step, then `take()`.

    A block with recompute calls its `watched` function; the timer sets that to the block's plain forward between two
    marks, taken only while a backward pass runs. Fused passes that recompute their own norms are not timed, nor are
    compiled blocks.
    """

    def __init__(self, model: nn.Module, device: torch.device, *, enabled: bool = True) -> None:
        """`enabled` is False for compiled blocks, which a new `watched` would compile again."""
        blocks = getattr(model, "blocks", None) if enabled else None
        self._blocks: list[Any] = [] if blocks is None else [b for b in blocks.values() if hasattr(b, "watched")]
        self._spans = ExposedWaits(device)

    @contextmanager
    def timed(self) -> Iterator[dict[str, float]]:
        for block in self._blocks:
            block.watched = partial(self._run, type(block).plain)
        try:
            yield {}
        finally:
            for block in self._blocks:
                del block.watched

    def take(self) -> dict[str, float]:
        """recompute_s of the last step, once the device has run it; nothing where nothing was recomputed."""
        seconds = self._spans.take()
        return {"recompute_s": seconds} if seconds else {}

    def _run(self, forward: Any, *args: Any) -> Any:
        if torch._C._current_graph_task_id() < 0:  # the forward pass
            return forward(*args)
        begin = self._spans.mark()
        try:
            return forward(*args)
        finally:  # torch raises out of it as soon as all saved tensors are recomputed
            self._spans.until_now(begin)
