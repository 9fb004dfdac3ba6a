"""What this process uses, as the operating system or the allocator counts it."""

from __future__ import annotations

import resource
import sys

import torch


def peak_memory(device: torch.device) -> float:
    """Largest memory so far in bytes: the allocator's on a GPU, the whole process's on a CPU."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(used if sys.platform == "darwin" else used * 1024)
