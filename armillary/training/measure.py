"""What this process uses, as the operating system or the allocator counts it."""

from __future__ import annotations

import resource
import sys

import torch

SOURCES = {"memory_peak_bytes": "allocator", "host_memory_bytes": "operating system", "loss": "model",
           "val_loss": "model", "grad_norm": "model", "lr": "schedule"}  # fmt: skip
"""how gauges are measured; the rest are differences of the wall clock"""


def memory_gauges(device: torch.device) -> dict[str, float]:
    """Largest memory so far: the allocator's on a GPU, and the whole process's on the host."""
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    host = {"host_memory_bytes": float(used if sys.platform == "darwin" else used * 1024)}
    if device.type != "cuda":
        return host
    return host | {"memory_peak_bytes": float(torch.cuda.max_memory_allocated(device))}


def source_of(gauges: dict[str, float]) -> dict[str, str]:
    return {name: SOURCES.get(name, "wall clock") for name in gauges}
