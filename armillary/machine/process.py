"""What this process takes of memory, as the operating system counts it."""

from __future__ import annotations

import os
import re
import resource
import sys
from pathlib import Path


def resident_bytes() -> float:
    """Memory of this process that is in RAM now; its largest so far where the system does not say (macOS)."""
    try:
        return float(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return peak_resident_bytes()


def peak_of(pid: int | str) -> float | None:
    """The most memory that a process had so far; none where the system does not say, or the process is gone."""
    try:
        found = re.search(r"^VmHWM:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except OSError:
        return None
    return float(found.group(1)) * 1024 if found else None


def peak_resident_bytes() -> float:
    """Its largest so far, of this program alone: what the system counts of the process began before it, with the one
    that started it."""
    if (found := peak_of("self")) is not None:
        return found
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(most if sys.platform == "darwin" else most * 1024)
