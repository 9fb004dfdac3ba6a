"""Others: how many cores the rest of the machine kept busy while something was measured.

A processor's ceilings measured beside other work are far too low, and steadily so: the spread does not tell.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

BUSY_CORES = 0.3
"""from here on figures of a processor are not worth keeping as ceilings"""


class Others:
    """Counts from when it is made."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._at, self._busy, self._own = time.monotonic(), self._busy_s(), _own_s()

    def cores(self) -> float | None:
        """Cores that other processes used on average so far; None where the system does not say."""
        busy, took = self._busy_s(), time.monotonic() - self._at
        if busy is None or self._busy is None or took <= 0:
            return None
        return max(0.0, (busy - self._busy - (_own_s() - self._own)) / took)

    def _busy_s(self) -> float | None:
        """Seconds all cores together spent on user and system work since the start of the machine."""
        try:
            fields = (self._root / "proc/stat").read_text().split("\n", 1)[0].split()
        except OSError:
            return None
        user, nice, system = (float(field) for field in fields[1:4])
        return (user + nice + system) / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    """Processor time of this process and of children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
