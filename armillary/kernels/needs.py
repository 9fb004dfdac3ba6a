"""What a version may need beside torch, and why it is not there; one line each, for the note that a fallback leaves."""

from __future__ import annotations

import shutil
import sysconfig
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch


def lacking(needs: tuple[str, ...], device: str) -> str | None:
    """Why one of `needs` cannot be had on `device`, or None."""
    return next((why for need in needs if (why := NEEDS[need](torch.device(device).type))), None)


def _triton(device: str) -> str | None:
    if find_spec("triton") is None:
        return "triton is not installed"
    return _cuda(device)


@cache
def interpreted() -> bool:
    """Whether Triton runs its kernels on the CPU, as the tests have it; never a reason to choose one."""
    if find_spec("triton") is None:
        return False
    import triton

    return bool(triton.knobs.runtime.interpret)


def _cuda(device: str) -> str | None:
    return None if device == "cuda" else "runs on a GPU only"


@cache
def _compile(device: str) -> str | None:
    if device == "cuda":
        return None if find_spec("triton") else "torch.compile needs triton on a GPU"
    compiler = any(map(shutil.which, ("g++", "clang++", "c++")))
    headers = (Path(sysconfig.get_path("include")) / "Python.h").is_file()
    return None if compiler and headers else "torch.compile needs a C++ compiler and Python.h"


def _liger(device: str) -> str | None:
    return "liger_kernel is not installed" if find_spec("liger_kernel") is None else _cuda(device)


def _cpu(device: str) -> str | None:
    return None if device == "cpu" else "it is plain torch, for a processor"


def _hopper(device: str) -> str | None:
    if _cuda(device):
        return _cuda(device)
    return None if torch.cuda.get_device_capability() >= (9, 0) else "needs compute capability 9.0"


NEEDS: dict[str, Callable[[str], str | None]] = {
    "triton": _triton,
    "cuda": _cuda,
    "cpu": _cpu,
    "compile": _compile,
    "liger": _liger,
    "hopper": _hopper,
}
"""name -> why it is not there on a device type, or None"""
