"""The device to run on, its threads, and its free memory."""

import torch

from armillary.errors import BadInput
from armillary.machine.cores import compute_threads
from armillary.machine.memory import available_bytes
from armillary.units import bytes_text


def pick_device(requested: str | None = None) -> torch.device:
    """The requested device, or the best that is available."""
    if requested is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(requested)
    except RuntimeError:
        raise BadInput(f"device '{requested}' is not known; try cpu, cuda or cuda:1") from None
    if device.type not in ("cpu", "cuda"):
        raise BadInput(f"device '{requested}' is not one we run on; try cpu, cuda or cuda:1")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise BadInput(f"there is no {requested} on this machine; armillary doctor says why, or use --device cpu")
    return device


def fit_threads(ranks: int = 1) -> None:
    """Let torch use at most as many threads as one of `ranks` processes on this machine has cores.

    torch counts the cores of the machine and not a container's quota. A lower number, as from OMP_NUM_THREADS, is kept.
    """
    wanted = compute_threads(ranks)
    if torch.get_num_threads() > wanted:
        torch.set_num_threads(wanted)


def free_bytes(device: torch.device) -> float | None:
    """Memory that can still be allocated on `device`; None where unknown."""
    return float(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else available_bytes()


def refuse_too_big(name: str, num_bytes: float, device: torch.device) -> None:
    """Refuse in one line what would run the machine out of memory."""
    free = free_bytes(device)
    if free is not None and num_bytes > free:
        need = f"{name} needs {bytes_text(num_bytes)} for its weights and {device} has {bytes_text(free)} free"
        raise BadInput(f"{need}; take bf16 (--dtype bf16, serve.dtype=bf16), a smaller model or a larger machine")
