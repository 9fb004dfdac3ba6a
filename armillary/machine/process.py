"""Resident memory of a process, now and at its peak.

Read from /proc, because training and the engine run on machines without psutil, which has no peak on Linux anyway.
"""

import os
import re
import resource
import sys
from pathlib import Path


def resident_bytes() -> float:
    """Resident memory of this process now; its peak on macOS, which has no /proc."""
    try:
        return float(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return peak_resident_bytes()


def peak_of(pid: int | str) -> float | None:
    """Peak resident memory of a process; none without /proc, or where the process has ended."""
    try:
        line = re.search(r"^VmHWM:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except OSError:
        return None
    return float(line.group(1)) * 1024 if line else None


def peak_resident_bytes() -> float:
    """Peak resident memory of this program: getrusage also counts the program that the process ran before."""
    if (peak := peak_of("self")) is not None:
        return peak
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak if sys.platform == "darwin" else peak * 1024)
