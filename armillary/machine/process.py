"""What this process holds of the machine."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path


def resident_bytes() -> float:
    """Memory of this process that is in RAM now; its largest so far where the system does not say (macOS)."""
    try:
        return float(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return float(most if sys.platform == "darwin" else most * 1024)
