"""Number formats and determinism of a run, set for its duration and put back after it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch


@contextmanager
def numerics(*, tf32: bool, deterministic: bool) -> Iterator[None]:
    """fp32 products through tf32 units where asked, and only kernels that give the same bits each time where asked."""
    before = torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
    torch.set_float32_matmul_precision("high" if tf32 else before[0])
    if deterministic:
        # cuBLAS reads this when its handle is made, and torch insists on it
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.use_deterministic_algorithms(before[1])


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Matrix products in bf16 over fp32 weights, or nothing."""
    return torch.autocast(device.type, torch.bfloat16) if precision == "bf16" else nullcontext()
