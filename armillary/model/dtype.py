"""Number formats by name, and the rule for sums that must not lose precision."""

from __future__ import annotations

import torch
from torch import Tensor

from armillary.errors import BadInput

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
HF_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float64: "float64"}


def parse_dtype(dtype: torch.dtype | str) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise BadInput(f"dtype '{dtype}' is not known; choose {', '.join(DTYPES)}")
    return DTYPES[dtype]


def widen(x: Tensor) -> Tensor:
    """At least fp32: half formats go up, fp64 stays."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
