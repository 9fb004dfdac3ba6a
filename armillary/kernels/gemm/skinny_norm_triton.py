"""The RMS norm of a few rows ahead of a small product, which may start before it ends."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from armillary.kernels.core.launch import power_of_two


def normed(x: Tensor, weight: Tensor, eps: float, early: bool) -> Tensor:
    """The RMS norm of rows; what follows may start before it ends, but it waits for what is ahead."""
    out, block = torch.empty_like(x), min(8192, power_of_two(x.shape[1]))
    norm_kernel[(len(x),)](
        x, weight, out, x.shape[1], eps, EARLY=early, BLOCK=block, num_warps=max(1, min(8, block // 512))
    )
    return out


@triton.jit
def norm_kernel(x_ptr, weight_ptr, out_ptr, K, eps, EARLY: tl.constexpr, BLOCK: tl.constexpr):
    """Program (row): x / √(mean x² + eps) · weight."""
    if EARLY:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64) * K
    at = tl.arange(0, BLOCK)
    squares = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, K, BLOCK):
        x = tl.load(x_ptr + row + begin + at, mask=begin + at < K, other=0.0).to(tl.float32)
        squares += x * x
    inverse = tl.rsqrt(tl.sum(squares, 0) / K + eps)
    for begin in range(0, K, BLOCK):
        inside = begin + at < K
        x = tl.load(x_ptr + row + begin + at, mask=inside, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + begin + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_ptr + row + begin + at, (x * inverse * weight).to(out_ptr.dtype.element_ty), mask=inside)
