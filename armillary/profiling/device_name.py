"""What a device is called in the files that keep its measurements: one name, the same for whoever writes or reads.

A GPU is named as its driver names it, a processor by its model and the threads that compute on it: two threads of a
processor are another device than sixty-four.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from armillary.profiling.gpus import gpus
from armillary.profiling.system import read_cpu


def device_name(device: Any = "cpu", *, threads: int | None = None) -> str:
    """The name of a torch device, or of 'cpu', 'cuda', 'cuda:1'; torch is imported for a GPU only.

    `threads` is how many threads compute on a processor; by default all that this process may use.
    """
    text = str(device)
    if text.startswith("cpu"):
        cpu = read_cpu(Path("/"))
        count = threads or cpu.usable
        return f"{cpu.model}, {count} thread{'s' if count > 1 else ''}"
    import torch

    return str(torch.cuda.get_device_name(torch.device(text)))


def names_here() -> tuple[str, ...]:
    """Names of this machine's GPUs as the driver's tools give them, then of its processor; torch is not needed."""
    return (*dict.fromkeys(gpu.name for gpu in gpus()), device_name("cpu"))
