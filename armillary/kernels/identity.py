"""What a remembered choice belongs to: the device by name, and the libraries and kernels it was found with."""

from __future__ import annotations

import hashlib
import platform
from functools import cache
from importlib import metadata
from pathlib import Path

import torch


def device_name(device: str) -> str:
    """A GPU as its driver names it; a processor by its model and the threads that compute on it."""
    if torch.device(device).type == "cuda":
        return str(torch.cuda.get_device_name(torch.device(device)))
    return f"{_cpu()}, {torch.get_num_threads()} threads"


@cache
def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


@cache
def revision() -> str:
    """Versions of torch, triton and CUDA, and a digest of our own kernels: a choice holds for these."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    cuda = torch.version.cuda or torch.version.hip or "none"
    return f"torch {torch.__version__} triton {_version('triton')} cuda {cuda} kernels {digest.hexdigest()[:12]}"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"
