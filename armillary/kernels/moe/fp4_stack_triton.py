"""Experts in MXFP4 in Triton: products of some rows with a vector, and all of them as 16-bit numbers."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from armillary.kernels.core.launch import ceil_div, on
from armillary.kernels.moe.fp4_stack import Fp4Stack
from armillary.kernels.quantized.packed_values_triton import fp4_pair, scale_number

# K inputs of a row, W = K / 8 words of eight codes each

_BYTES = 1024  # of codes per program


@triton.jit
def fp4_products(
    words_row,
    scale_row,
    x_ptr,
    norm_ptr,
    begin,
    K: tl.constexpr,
    HAS_NORM: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """[ROWS, DEPTH / 32] sums over groups of columns from `begin` on, for rows that start at these words [ROWS, 1]. One
    thread has the four words of a group."""
    word = begin // 8 + tl.arange(0, DEPTH // 8)
    inside = word < K // 8
    w = tl.load(words_row + word[None, :], mask=inside[None, :], other=0, eviction_policy="evict_first")
    sums = tl.zeros([ROWS, DEPTH // 8], tl.float32)
    for j in tl.static_range(4):
        low, high = fp4_pair(w, j)
        sums += low * _input(x_ptr, norm_ptr, 8 * word + j, inside, HAS_NORM)[None, :]
        sums += high * _input(x_ptr, norm_ptr, 8 * word + j + 4, inside, HAS_NORM)[None, :]
    groups = tl.sum(tl.reshape(sums, (ROWS, DEPTH // 32, 4)), 2)
    group = begin // 32 + tl.arange(0, DEPTH // 32)
    scale = tl.load(scale_row + group[None, :], mask=group[None, :] < K // 32, other=0)
    return groups * (scale_number(scale, "mxfp4") * 16384.0)


@triton.jit
def _input(x_ptr, norm_ptr, column, inside, HAS_NORM: tl.constexpr):
    x = tl.load(x_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        x = x * tl.load(norm_ptr + column, mask=inside, other=0.0).to(tl.float32)
    return x


def dequantised(stack: Fp4Stack, dtype: torch.dtype) -> Tensor:
    """[E, N, K]: for many tokens, whose GEMMs take far longer than that."""
    codes, scale = stack.contiguous()
    out = torch.empty(stack.shape, dtype=dtype, device=codes.device)
    with on(out):
        dequantise_kernel[(ceil_div(codes.numel(), _BYTES),)](
            codes, scale, out, codes.numel(), BYTES=_BYTES, num_warps=4
        )
    return out


@triton.jit
def dequantise_kernel(codes_ptr, scale_ptr, out_ptr, size, BYTES: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    codes = tl.load(codes_ptr + at, mask=at < size, other=0).to(tl.int32)
    scale = scale_number(tl.load(scale_ptr + at // 16, mask=at < size, other=0), "mxfp4") * 16384.0
    low, _ = fp4_pair(codes, 0)
    high, _ = fp4_pair(codes, 1)
    both = tl.reshape(tl.join(low * scale, high * scale), (2 * BYTES,))
    where = 2 * tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, 2 * BYTES)
    tl.store(out_ptr + where, both.to(out_ptr.dtype.element_ty), mask=where < 2 * size)
