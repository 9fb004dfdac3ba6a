"""Runs a server as a child and ends it when nobody renews the pool's lease file: no orphan outlives its service.

    python -m armillary.fleet.pool.keeper LEASE SECONDS COMMAND…

An autoscaler that is killed and started again within SECONDS finds its servers running and adopts them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

_POLL_S = 0.5
_KILL_AFTER_S = 60.0
"""time that a server has to end itself after the lease has run out"""


def keep(lease: str, lasts_s: float, command: list[str]) -> int:
    """Run `command` to its end, and end it where the lease is older than `lasts_s`; its exit code."""
    child = subprocess.Popen(command)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda got, _: child.send_signal(got))
    ended_at: float | None = None
    while True:
        with suppress(subprocess.TimeoutExpired):
            return child.wait(_POLL_S)
        if ended_at is None and _age_s(lease) > lasts_s:
            ended_at = time.monotonic()
            child.terminate()
        if ended_at is not None and time.monotonic() - ended_at > _KILL_AFTER_S:
            child.kill()


def _age_s(lease: str) -> float:
    try:
        return time.time() - os.stat(lease).st_mtime
    except OSError:
        return float("inf")


if __name__ == "__main__":
    sys.exit(keep(sys.argv[1], float(sys.argv[2]), sys.argv[3:]))
