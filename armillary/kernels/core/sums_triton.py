"""A sum in fp32 that narrower gradients are added to, one after the other, each in one pass."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from armillary.kernels.core.launch import ceil_div, on

_BLOCK, _WARPS = 4096, 8


def add_(total: Tensor, part: Tensor) -> None:
    """total + part, in place; both whole and of one shape."""
    assert total.shape == part.shape and total.is_contiguous() and part.is_contiguous(), "whole tensors of one shape"
    count = total.numel()
    if count:
        with on(total):
            add_kernel[(ceil_div(count, _BLOCK),)](total, part, count, BLOCK=_BLOCK, num_warps=_WARPS)


@triton.jit
def add_kernel(total_ptr, part_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    part = tl.load(part_ptr + at, mask=inside, other=0.0).to(total_ptr.dtype.element_ty)
    tl.store(total_ptr + at, tl.load(total_ptr + at, mask=inside, other=0.0) + part, mask=inside)
