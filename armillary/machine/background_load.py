"""Background load: how many cores other processes kept busy during a measurement.

Ceilings of a CPU that other processes use are far too low, and consistently so: their spread does not show it.
"""

import os
import time

BUSY_CORES = 0.3
"""with more cores busy, figures of a CPU are not kept as ceilings"""


class BackgroundLoad:
    """Counts from its creation."""

    def __init__(self) -> None:
        self._at, self._busy, self._own = time.monotonic(), _busy_s(), _own_s()

    def cores(self) -> float | None:
        """Cores that other processes used on average so far; None where psutil is not installed."""
        busy, took = _busy_s(), time.monotonic() - self._at
        if busy is None or self._busy is None or took <= 0:
            return None
        return max(0.0, (busy - self._busy - (_own_s() - self._own)) / took)


def _busy_s() -> float | None:
    """CPU seconds of user and system work on all cores since boot."""
    try:
        import psutil
    except ModuleNotFoundError:
        return None
    times = psutil.cpu_times()
    return float(times.user + getattr(times, "nice", 0.0) + times.system)


def _own_s() -> float:
    """CPU seconds of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
