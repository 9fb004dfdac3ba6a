"""Quiet: how much others computed on this machine while something was measured.

A second of another program's work makes steps of two threads on two cores ten times as long, and a small run is over in
a few seconds: what it then tells is of the other program.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

STAT = Path("/proc/stat")
"""Linux: what all processors did since the start, in ticks: user, nice, system, idle, iowait, irq, softirq, steal"""
LOUD = 0.2
"""cores that others had: what a machine does by itself is a few hundredths"""


class Quiet:
    """From its making on."""

    def __init__(self) -> None:
        self._begin, self._busy, self._own = time.monotonic(), _busy_s(), _own_s()

    @property
    def others(self) -> float:
        """Cores that others had, on average; 0 where the system does not say."""
        took = time.monotonic() - self._begin
        return max(0.0, (_busy_s() - self._busy) - (_own_s() - self._own)) / took if took else 0.0


def _busy_s() -> float:
    """Seconds in which a processor ran programs, or was lent to another machine; what interrupts took is nobody's, and
    ranks that talk make many."""
    try:
        ticks = [int(word) for word in STAT.read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return 0.0
    return (sum(ticks[:3]) + ticks[7]) / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    """Of this process and of those it started and has waited for."""
    return sum(os.times()[:4])
