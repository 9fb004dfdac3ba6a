"""Transposed fp8 with a scale for each of its rows, which are columns of what is made: their largest values first, then
the cast. Nothing is written in between, so what makes the numbers runs twice.
"""

from __future__ import annotations

import triton
import triton.language as tl

from armillary.kernels.fp8.cast_rows_triton import made
from armillary.kernels.fp8.quantize_triton import _TINY, _cast, _scale

# M rows, K columns of what is made


@triton.jit
def amax_kernel(
    x_ptr,
    dy_ptr,
    weight_ptr,
    bias_ptr,
    mean_ptr,
    rstd_ptr,
    amax_ptr,
    M,
    K,
    x_stride,
    dy_stride,
    KIND: tl.constexpr,
    ACT: tl.constexpr,
    GATED: tl.constexpr,
    RMS: tl.constexpr,
    WEIGHT: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Columns of a stretch of rows; the order of maxima does not matter, so atomics give the same every time."""
    first = tl.program_id(0) * BLOCK_K
    k = first + tl.arange(0, BLOCK_K)
    begin = tl.program_id(1).to(tl.int64) * ROWS
    top = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    for step in tl.range(0, ROWS, BLOCK_M):
        m = begin + step + tl.arange(0, BLOCK_M)
        y = made(
            x_ptr,
            dy_ptr,
            weight_ptr,
            bias_ptr,
            mean_ptr,
            rstd_ptr,
            m,
            first,
            M,
            K,
            x_stride,
            dy_stride,
            KIND,
            ACT,
            GATED,
            RMS,
            WEIGHT,
            PLUS_ONE,
            BIAS,
            BLOCK_M,
            BLOCK_K,
        )
        top = tl.maximum(top, tl.abs(y))
    tl.atomic_max(amax_ptr + k, tl.max(top, 0), mask=k < K, sem="relaxed")


@triton.jit
def cast_kernel(
    x_ptr,
    dy_ptr,
    weight_ptr,
    bias_ptr,
    mean_ptr,
    rstd_ptr,
    amax_ptr,
    transposed_ptr,
    scale_ptr,
    M,
    K,
    padded,
    x_stride,
    dy_stride,
    KIND: tl.constexpr,
    ACT: tl.constexpr,
    GATED: tl.constexpr,
    RMS: tl.constexpr,
    WEIGHT: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    BIAS: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A tile whose columns' largest values are known, transposed. The last tiles come first: the pass before left them
    in the cache."""
    across = tl.cdiv(K, BLOCK_K)
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    m = (tile // across).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    first = tile % across * BLOCK_K
    k = first + tl.arange(0, BLOCK_K)
    y = made(
        x_ptr,
        dy_ptr,
        weight_ptr,
        bias_ptr,
        mean_ptr,
        rstd_ptr,
        m,
        first,
        M,
        K,
        x_stride,
        dy_stride,
        KIND,
        ACT,
        GATED,
        RMS,
        WEIGHT,
        PLUS_ONE,
        BIAS,
        BLOCK_M,
        BLOCK_K,
    )
    top = tl.maximum(tl.load(amax_ptr + k, mask=k < K, other=1.0), _TINY)
    if tile // across == 0:
        tl.store(scale_ptr + k, _scale(top, LARGEST), mask=k < K)
    q = _cast(y, top[None, :], transposed_ptr.dtype.element_ty, LARGEST)
    at = k.to(tl.int64)[:, None] * padded + m[None, :]
    tl.store(transposed_ptr + at, tl.trans(q), mask=(k[:, None] < K) & (m[None, :] < padded))
