"""Lag of the load generator: how late its event loop wakes up, and how much of a core it uses.

Time stamps of an overloaded generator measure the generator, so its lag is part of the report.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from armillary.stats import percentile

_INTERVAL_S = 0.01
_BUSY_FRACTION = 0.85
_LATE_FRACTION = 0.1


@dataclass(frozen=True, kw_only=True)
class Lag:
    """The generator's own delay: of its event loop's timers (and so of time stamps), of sending after the due time, and
    the fraction of one core that its busiest process used."""

    loop_p99_s: float = 0.0
    loop_max_s: float = 0.0
    send_p99_s: float = 0.0
    cpu_fraction: float = 0.0

    @property
    def busy(self) -> bool:
        """Whether a process uses up its core."""
        return self.cpu_fraction > _BUSY_FRACTION

    def limits(self, typical_s: float) -> bool:
        """Whether the generator's lag distorts latencies around `typical_s`."""
        return self.busy or max(self.loop_p99_s, self.send_p99_s) > max(0.005, _LATE_FRACTION * typical_s)


class LagWatch:
    """Measures the event loop's lag: `async with LagWatch() as watch`."""

    def __init__(self) -> None:
        self.timer_delays_s: list[float] = []
        self.cpu_fraction = 0.0

    async def __aenter__(self) -> LagWatch:
        self._begin = time.monotonic(), time.process_time()
        self._task = asyncio.create_task(self._tick())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        wall, used = time.monotonic() - self._begin[0], time.process_time() - self._begin[1]
        self.cpu_fraction = used / wall if wall > 0 else 0.0

    async def _tick(self) -> None:
        while True:
            wake_at = time.monotonic() + _INTERVAL_S
            await asyncio.sleep(_INTERVAL_S)
            self.timer_delays_s.append(max(0.0, time.monotonic() - wake_at))


def lag_of(timer_delays_s: list[float], send_delays_s: list[float], cpu_fraction: float) -> Lag:
    return Lag(
        loop_p99_s=percentile(timer_delays_s, 99),
        loop_max_s=max(timer_delays_s, default=0.0),
        send_p99_s=percentile(send_delays_s, 99),
        cpu_fraction=cpu_fraction,
    )
