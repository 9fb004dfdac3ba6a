"""The name of a device in the files of its measurements and kernel choices, the same for every writer and reader.

A GPU has its driver's name, a CPU its model and number of compute threads: two threads of a CPU are another device than
sixty-four.
"""

from typing import Any

from armillary.machine.cores import compute_threads
from armillary.machine.cpu_name import cpu_name


def device_name(device: Any = "cpu", *, threads: int | None = None) -> str:
    """The name of a torch device, or of 'cpu', 'cuda', 'cuda:1'; torch is imported for a GPU only.

    `threads` is the number of compute threads of a CPU; by default one per core that this process may use.
    """
    text = str(device)
    if text.startswith("cpu"):
        count = threads or compute_threads()
        return f"{cpu_name()}, {count} thread{'s' if count > 1 else ''}"
    import torch

    return str(torch.cuda.get_device_name(torch.device(text)))
