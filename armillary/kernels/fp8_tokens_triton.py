"""Operands of fp8 products in one pass, with a scale a token: a program holds a whole row of what is made.

Scales are powers of two, so that the transposed operand, which has one scale for all, is made of the rows in fp8 by
moving exponents: nothing is rounded twice, but what falls below the format's normal numbers. So what makes the numbers
is read once, and only fp8 is read and written after.
"""

from __future__ import annotations

import triton
import triton.language as tl

from armillary.kernels.fp8_operands_triton import _made, _weighed
from armillary.kernels.fp8_quantise_triton import _TINY

# M rows, K columns of what is made

_FRACTION: tl.constexpr = tl.constexpr(0x7FFFFF)


@triton.jit
def _power_above(x):
    """The smallest power of two at or above a positive number."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + _FRACTION) & ~_FRACTION).to(tl.float32, bitcast=True)


@triton.jit
def _held(x, LARGEST: tl.constexpr):
    """Within the format; NaN stays NaN."""
    return tl.where(x > LARGEST, LARGEST, tl.where(x < -LARGEST, -LARGEST, x))


@triton.jit
def rows_kernel(
    x_ptr, dy_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr, q_ptr, scale_ptr, top_ptr, M, K, x_stride, dy_stride, eps,
    KIND: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr, RMS: tl.constexpr, WEIGHT: tl.constexpr,
    PLUS_ONE: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr, HELD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows of fp8, their scales, and the largest scale of all; of a norm also the statistics."""
    m = tl.program_id(0).to(tl.int64) * HELD + tl.arange(0, HELD)
    k = tl.arange(0, BLOCK)
    there, inside = m < M, (m[:, None] < M) & (k[None, :] < K)
    if KIND == "norm":
        y = tl.load(x_ptr + m[:, None] * x_stride + k[None, :], mask=inside, other=0.0).to(tl.float32)
        if not RMS:
            mean = tl.sum(y, 1) / K
            tl.store(mean_ptr + m, mean, mask=there)
            y = tl.where(inside, y - mean[:, None], 0.0)
        rstd = tl.rsqrt(tl.sum(y * y, 1) / K + eps)
        tl.store(rstd_ptr + m, rstd, mask=there)
        y = _weighed(y * rstd[:, None], weight_ptr, bias_ptr, k, K, WEIGHT, PLUS_ONE, BIAS)
        y = tl.where(inside, y, 0.0)
    else:
        y = _made(
            x_ptr, dy_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr, m, 0, M, K, x_stride, dy_stride, KIND, ACT, GATED,
            RMS, WEIGHT, PLUS_ONE, BIAS, HELD, BLOCK,
        )  # fmt: skip
    scale = _power_above(tl.maximum(tl.max(tl.abs(y), 1), _TINY) / LARGEST)
    tl.store(scale_ptr + m, scale, mask=there)
    tl.atomic_max(top_ptr, tl.max(tl.where(there, scale, 0.0), 0), sem="relaxed")
    q = _held(y * (1.0 / scale)[:, None], LARGEST).to(q_ptr.dtype.element_ty)
    tl.store(q_ptr + m[:, None] * K + k[None, :], q, mask=inside)


@triton.jit
def turn_kernel(
    q_ptr, scale_ptr, top_ptr, turned_ptr, M, K, padded,
    LARGEST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile of the rows, transposed, at the largest scale; beyond the rows there are zeros. The last tiles come first:
    the pass before left them in the cache."""
    across = tl.cdiv(K, BLOCK_K)
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    m = (tile // across).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tile % across * BLOCK_K + tl.arange(0, BLOCK_K)
    q = tl.load(q_ptr + m[:, None] * K + k[None, :], mask=(m[:, None] < M) & (k[None, :] < K), other=0.0)
    share = tl.load(scale_ptr + m, mask=m < M, other=0.0) / tl.load(top_ptr)
    q = _held(q.to(tl.float32) * share[:, None], LARGEST).to(turned_ptr.dtype.element_ty)
    at = k.to(tl.int64)[:, None] * padded + m[None, :]
    tl.store(turned_ptr + at, tl.trans(q), mask=(k[:, None] < K) & (m[None, :] < padded))
