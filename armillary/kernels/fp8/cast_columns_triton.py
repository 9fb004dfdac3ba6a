"""Transposed fp8 operands with per-row scales (per column of the source): first the amax of each column, then the cast.

Nothing is written in between, so the source values are computed twice.
"""

import triton
import triton.language as tl

from armillary.kernels.fp8.cast_rows_triton import source_values
from armillary.kernels.fp8.quantize_triton import TINY_AMAX, cast, scale_of

# M rows, K columns of the source values


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
    """amax of columns over a range of rows; maxima do not depend on their order, so atomics are deterministic."""
    first = tl.program_id(0) * BLOCK_K
    k = first + tl.arange(0, BLOCK_K)
    begin = tl.program_id(1).to(tl.int64) * ROWS
    top = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    for step in tl.range(0, ROWS, BLOCK_M):
        m = begin + step + tl.arange(0, BLOCK_M)
        y = source_values(
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
    """A tile with known amax per column, transposed. The last tiles come first: the previous pass left them in the
    cache."""
    across = tl.cdiv(K, BLOCK_K)
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    m = (tile // across).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    first = tile % across * BLOCK_K
    k = first + tl.arange(0, BLOCK_K)
    y = source_values(
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
    top = tl.maximum(tl.load(amax_ptr + k, mask=k < K, other=1.0), TINY_AMAX)
    if tile // across == 0:
        tl.store(scale_ptr + k, scale_of(top, LARGEST), mask=k < K)
    q = cast(y, top[None, :], transposed_ptr.dtype.element_ty, LARGEST)
    at = k.to(tl.int64)[:, None] * padded + m[None, :]
    tl.store(transposed_ptr + at, tl.trans(q), mask=(k[:, None] < K) & (m[None, :] < padded))
