"""What a device is called in the files that keep its measurements: one name, the same for whoever writes or reads.

A GPU is named as its driver names it, a CPU by its model and the threads that compute on it: two threads of a CPU are
another device than sixty-four.
"""

from __future__ import annotations

from typing import Any

from armillary.machine.cores import compute_threads
from armillary.machine.cpu_name import cpu_name
from armillary.machine.gpus import gpus


def device_name(device: Any = "cpu", *, threads: int | None = None) -> str:
    """The name of a torch device, or of 'cpu', 'cuda', 'cuda:1'; torch is imported for a GPU only.

    `threads` is how many threads compute on a CPU; by default one for each core that this process may use.
    """
    text = str(device)
    if text.startswith("cpu"):
        count = threads or compute_threads()
        return f"{cpu_name()}, {count} thread{'s' if count > 1 else ''}"
    import torch

    return str(torch.cuda.get_device_name(torch.device(text)))


def names_here() -> tuple[str, ...]:
    """Names of this machine's GPUs as the driver's tools give them, then of its CPU; torch is not needed."""
    return (*dict.fromkeys(gpu.name for gpu in gpus()), device_name("cpu"))
