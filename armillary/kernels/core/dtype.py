"""Number formats by name, and the two ways up: at least fp32 for sums, one format wider for a reference."""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}


def widen(x: Tensor) -> Tensor:
    """At least fp32: half formats go up, fp64 stays."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def reference_dtype(dtype: torch.dtype) -> torch.dtype:
    """What a result in `dtype` is judged in: fp32 for half formats, fp64 above."""
    return torch.float64 if dtype in (torch.float32, torch.float64) else torch.float32
