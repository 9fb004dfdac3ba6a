"""Whether the load generator itself is the bottleneck: how late its own loop wakes up, and how much of a core it took.

A time stamp of an overloaded generator measures the generator; its lag is therefore part of the report.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from armillary.stats import percentile

_EVERY_S = 0.01
_BUSY = 0.85
_LATE_SHARE = 0.1


@dataclass(frozen=True, kw_only=True)
class Lag:
    """The generator's own delay."""

    loop_p99_s: float = 0.0
    """how late a timer of its event loop fired, 99th percentile: what a time stamp may be late"""
    loop_max_s: float = 0.0
    """the worst of them"""
    send_p99_s: float = 0.0
    """sent later than due, 99th percentile"""
    cpu_fraction: float = 0.0
    """share of one core that the busiest sending process used"""

    @property
    def busy(self) -> bool:
        """A process that has used up its core."""
        return self.cpu_fraction > _BUSY

    def limits(self, typical_s: float) -> bool:
        """Whether figures around `typical_s` are those of the generator rather than of the server."""
        return self.busy or max(self.loop_p99_s, self.send_p99_s) > max(0.005, _LATE_SHARE * typical_s)


class LagWatch:
    """Measures a loop while it runs: `async with LagWatch() as watch`."""

    def __init__(self) -> None:
        self.late: list[float] = []
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
            due = time.monotonic() + _EVERY_S
            await asyncio.sleep(_EVERY_S)
            self.late.append(max(0.0, time.monotonic() - due))


def lag_of(late_s: list[float], send_late_s: list[float], cpu_fraction: float) -> Lag:
    return Lag(
        loop_p99_s=percentile(late_s, 99),
        loop_max_s=max(late_s, default=0.0),
        send_p99_s=percentile(send_late_s, 99),
        cpu_fraction=cpu_fraction,
    )
