"""Key of a stored choice of kernels: the device's name, and the versions of libraries and kernels."""

import hashlib
from functools import cache
from importlib import metadata
from pathlib import Path

import torch

from armillary.machine.device_name import device_name as named


def device_name(device: str) -> str:
    """A GPU by its driver's name; a CPU by its name and its number of compute threads."""
    return _named(device, torch.get_num_threads())


@cache
def _named(device: str, threads: int) -> str:
    return named(device, threads=threads)


@cache
def revision() -> str:
    """Versions of torch, triton and CUDA, and a digest of our own kernels; a stored choice is valid for these only."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    cuda = torch.version.cuda or torch.version.hip or "none"
    return f"torch {torch.__version__} triton {_version('triton')} cuda {cuda} kernels {digest.hexdigest()[:12]}"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"
