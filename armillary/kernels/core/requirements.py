"""Requirements of a version beside torch (triton, a compiler, GPU units), and why one is not met, in one line each."""

import logging
import shutil
import sysconfig
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

from armillary.machine.accelerator import Accelerator, accelerator_of

# name -> whether a GPU has it, and the message where it has not
_UNITS: dict[str, tuple[Callable[[Accelerator], bool], str]] = {
    "sm_80": (lambda chip: chip.has_capability((8, 0)), "needs an NVIDIA GPU of compute capability 8.0"),
    "sm_90": (lambda chip: chip.has_capability((9, 0)), "needs an NVIDIA GPU of compute capability 9.0"),
    "wgmma": (lambda chip: chip.wgmma, "needs warpgroup MMAs, which NVIDIA GPUs of compute capability 9.0 have"),
    "tma": (lambda chip: chip.tma, "needs TMA, which NVIDIA GPUs have from compute capability 9.0 on"),
    "fp8": (lambda chip: chip.fp8, "needs fp8 units, which NVIDIA GPUs have from compute capability 8.9 on"),
    "grouped_gemm": (lambda chip: chip.grouped_gemm, "torch has no grouped GEMM for this GPU"),
}


def lacking(needs: tuple[str, ...], device: str) -> str | None:
    """Why one of `needs` is not met on `device`, or None."""
    kind = torch.device(device)
    return next((why for need in needs if (why := _lacking_one(need, kind))), None)


def has_triton(device: torch.device) -> bool:
    """Whether Triton kernels run there: triton is installed, and the device is a GPU that it compiles for."""
    return _triton(device) is None


def _lacking_one(need: str, device: torch.device) -> str | None:
    if need not in _UNITS:
        return NEEDS[need](device)
    chip = accelerator_of(device)
    has, why = _UNITS[need]
    return _cuda(device) if chip is None else None if has(chip) else why


@cache
def _installed() -> bool:
    return find_spec("triton") is not None


def _triton(device: torch.device) -> str | None:
    if not _installed():
        return "triton is not installed"
    chip = accelerator_of(device)
    if chip is None:
        return _cuda(device)
    return "triton needs compute capability 8.0" if chip.vendor == "nvidia" and chip.capability < (8, 0) else None


@cache
def interpreted() -> bool:
    """Whether Triton interprets its kernels on the CPU, as in tests; never a reason to choose one."""
    if not _installed():
        return False
    import triton

    return bool(triton.knobs.runtime.interpret)


def _cuda(device: torch.device) -> str | None:
    return None if device.type == "cuda" else "runs on a GPU only"


@cache
def _compile(device: torch.device) -> str | None:
    if device.type == "cuda":
        return None if _installed() else "torch.compile needs triton on a GPU"
    compiler = any(map(shutil.which, ("g++", "clang++", "c++")))
    headers = (Path(sysconfig.get_path("include")) / "Python.h").is_file()
    return None if compiler and headers else "torch.compile needs a C++ compiler and Python.h"


def _liger(device: torch.device) -> str | None:
    return "liger_kernel is not installed" if find_spec("liger_kernel") is None else _triton(device)


def _no_triton(device: torch.device) -> str | None:
    return "it is plain torch, for devices without triton" if has_triton(device) else None


# name -> why it is not met on a device, or None; GPU units are in _UNITS
NEEDS: dict[str, Callable[[torch.device], str | None]] = {
    "triton": _triton,
    "no_triton": _no_triton,
    "cuda": _cuda,
    "compile": _compile,
    "liger": _liger,
}

LOG = logging.getLogger("armillary.kernels")


@cache
def note_once(text: str) -> None:
    """Log a warning, once per process."""
    LOG.warning(text)
