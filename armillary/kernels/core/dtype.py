"""Dtypes by name, and the wider dtypes that sums and references are computed in."""

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
    """At least fp32: 16-bit dtypes become fp32, fp64 stays."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def reference_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a result in `dtype` is judged: fp32 for 16-bit dtypes, else fp64."""
    return torch.float64 if dtype in (torch.float32, torch.float64) else torch.float32
