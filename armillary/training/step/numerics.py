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


HALF = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
"""precision -> what products run in, over weights in fp32; with fp8, those that are not in fp8"""


def autocast(precision: str, device: torch.device, *, wanted: bool = True) -> AbstractContextManager[object]:
    """Matrix products in a half format over fp32 weights; nothing where weights are cast in another way."""
    half = HALF.get(precision)
    return torch.autocast(device.type, half) if half is not None and wanted else nullcontext()
