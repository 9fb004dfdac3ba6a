"""Operands of fp8 products straight from what makes them: a norm, an activation, its backward pass, or plain
numbers.

What is made is gone over twice: once for its largest values, which make the scales, and once to be cast, when it is
written as it stands and transposed at the same time, because the tensor cores want every operand along the summed dim.
Nothing is written in between.
"""

from __future__ import annotations

import triton
import triton.language as tl

from armillary.kernels.activations_triton import act, act_and_slope, through
from armillary.kernels.fp8_quantise_triton import _TINY, _cast, _scale
from armillary.kernels.gated_triton import gated_act, gated_act_back

# M rows, K columns of what is made


@triton.jit
def _made(
    x_ptr, dy_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr, m, first, M, K, x_stride, dy_stride,
    KIND: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr, RMS: tl.constexpr, WEIGHT: tl.constexpr,
    PLUS_ONE: tl.constexpr, BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Columns first … first + BLOCK_K of rows m, in fp32; zeros beyond."""
    FAST: tl.constexpr = x_ptr.dtype.element_ty != tl.float32
    k = first + tl.arange(0, BLOCK_K)
    there = m[:, None] < M
    inside = there & (k[None, :] < K)
    if KIND == "activation":
        if GATED:
            at = 2 * first + tl.arange(0, 2 * BLOCK_K)
            x = tl.load(x_ptr + m[:, None] * x_stride + at[None, :], mask=there & (at[None, :] < 2 * K), other=0.0)
            gate, up = tl.split(tl.reshape(x.to(tl.float32), [BLOCK_M, BLOCK_K, 2]))
            y = gated_act(gate, up, ACT, FAST)
        else:
            x = tl.load(x_ptr + m[:, None] * x_stride + k[None, :], mask=inside, other=0.0)
            y = act(x.to(tl.float32), ACT, FAST)
    elif KIND == "backward":
        x = tl.load(x_ptr + m[:, None] * x_stride + k[None, :], mask=inside, other=0.0).to(tl.float32)
        if GATED:
            at = first // 2 + tl.arange(0, BLOCK_K // 2)
            dy = tl.load(dy_ptr + m[:, None] * dy_stride + at[None, :], mask=there & (at[None, :] < K // 2), other=0.0)
            gate, up = tl.split(tl.reshape(x, [BLOCK_M, BLOCK_K // 2, 2]))
            _, dgate, dup = gated_act_back(dy.to(tl.float32), gate, up, ACT, FAST)
            y = tl.reshape(tl.join(dgate, dup), [BLOCK_M, BLOCK_K])
        else:
            dy = tl.load(dy_ptr + m[:, None] * dy_stride + k[None, :], mask=inside, other=0.0).to(tl.float32)
            _, slope = act_and_slope(x, ACT, FAST)
            y = through(dy, slope, x, ACT)
    else:
        y = tl.load(x_ptr + m[:, None] * x_stride + k[None, :], mask=inside, other=0.0).to(tl.float32)
        if KIND == "norm":
            if not RMS:
                y -= tl.load(mean_ptr + m, mask=m < M, other=0.0)[:, None]
            y *= tl.load(rstd_ptr + m, mask=m < M, other=0.0)[:, None]
            y = _weighed(y, weight_ptr, bias_ptr, k, K, WEIGHT, PLUS_ONE, BIAS)
            y = tl.where(inside, y, 0.0)
    return y


@triton.jit
def _weighed(y, weight_ptr, bias_ptr, k, K, WEIGHT: tl.constexpr, PLUS_ONE: tl.constexpr, BIAS: tl.constexpr):
    """A norm's weight and bias on rows of normed numbers [M, K]."""
    if WEIGHT:
        weight = tl.load(weight_ptr + k, mask=k < K, other=0.0).to(tl.float32)
        y *= (weight + 1.0 if PLUS_ONE else weight)[None, :]
    if BIAS:
        y += tl.load(bias_ptr + k, mask=k < K, other=0.0).to(tl.float32)[None, :]
    return y


@triton.jit
def amax_kernel(
    x_ptr, dy_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr, row_amax_ptr, column_amax_ptr, M, K, x_stride, dy_stride,
    KIND: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr, RMS: tl.constexpr, WEIGHT: tl.constexpr,
    PLUS_ONE: tl.constexpr, BIAS: tl.constexpr, BY_ROW: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The largest values of some columns of a stretch of rows; the order of maxima does not matter, so atomics keep
    results the same every time."""
    first = tl.program_id(0) * BLOCK_K
    k = first + tl.arange(0, BLOCK_K)
    begin = tl.program_id(1).to(tl.int64) * ROWS
    top = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    for step in tl.static_range(0, ROWS, BLOCK_M):
        m = begin + step + tl.arange(0, BLOCK_M)
        y = tl.abs(_made(
            x_ptr, dy_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr, m, first, M, K, x_stride, dy_stride, KIND, ACT,
            GATED, RMS, WEIGHT, PLUS_ONE, BIAS, BLOCK_M, BLOCK_K,
        ))  # fmt: skip
        top = tl.maximum(top, y)
        if BY_ROW:
            tl.atomic_max(row_amax_ptr + m, tl.max(y, 1), mask=m < M, sem="relaxed")
    if BY_ROW:
        tl.atomic_max(column_amax_ptr + k, tl.max(top, 0), mask=k < K, sem="relaxed")
    else:
        tl.atomic_max(column_amax_ptr, tl.max(tl.max(top, 0), 0), sem="relaxed")


@triton.jit
def stats_kernel(
    x_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr, row_amax_ptr, column_amax_ptr, M, K, x_stride, eps,
    RMS: tl.constexpr, WEIGHT: tl.constexpr, PLUS_ONE: tl.constexpr, BIAS: tl.constexpr, BY_ROW: tl.constexpr,
    HELD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of a norm: 1 / deviation and mean of each row, and the largest values of what it gives. Programs go over the rows
    in turn."""
    k = tl.arange(0, BLOCK)
    inside = (k < K)[None, :]
    top = tl.zeros((HELD, BLOCK), tl.float32)
    for block in tl.range(tl.program_id(0), tl.cdiv(M, HELD), tl.num_programs(0)):
        m = block * HELD + tl.arange(0, HELD).to(tl.int64)
        there = m < M
        x = tl.load(x_ptr + m[:, None] * x_stride + k[None, :], mask=there[:, None] & inside, other=0.0)
        x = x.to(tl.float32)
        if not RMS:
            mean = tl.sum(x, 1) / K
            tl.store(mean_ptr + m, mean, mask=there)
            x = tl.where(inside, x - mean[:, None], 0.0)
        rstd = tl.rsqrt(tl.sum(x * x, 1) / K + eps)
        tl.store(rstd_ptr + m, rstd, mask=there)
        y = _weighed(x * rstd[:, None], weight_ptr, bias_ptr, k, K, WEIGHT, PLUS_ONE, BIAS)
        y = tl.where(there[:, None] & inside, tl.abs(y), 0.0)
        top = tl.maximum(top, y)
        if BY_ROW:
            tl.store(row_amax_ptr + m, tl.max(y, 1), mask=there)
    if BY_ROW:
        tl.atomic_max(column_amax_ptr + k, tl.max(top, 0), mask=k < K, sem="relaxed")
    else:
        tl.atomic_max(column_amax_ptr, tl.max(tl.max(top, 0), 0), sem="relaxed")


@triton.jit
def cast_kernel(
    x_ptr, dy_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr, row_amax_ptr, column_amax_ptr, rows_ptr, turned_ptr,
    row_scale_ptr, column_scale_ptr, M, K, padded, x_stride, dy_stride,
    KIND: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr, RMS: tl.constexpr, WEIGHT: tl.constexpr,
    PLUS_ONE: tl.constexpr, BIAS: tl.constexpr, BY_ROW: tl.constexpr, ROWS: tl.constexpr, TURNED: tl.constexpr,
    LARGEST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile whose largest values are known, as it stands and transposed. The last tiles come first: the pass before
    left them in the cache."""
    across = tl.cdiv(K, BLOCK_K)
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    m = (tile // across).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    first = tile % across * BLOCK_K
    k = first + tl.arange(0, BLOCK_K)
    y = _made(
        x_ptr, dy_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr, m, first, M, K, x_stride, dy_stride, KIND, ACT, GATED,
        RMS, WEIGHT, PLUS_ONE, BIAS, BLOCK_M, BLOCK_K,
    )  # fmt: skip
    if BY_ROW:
        row_top = tl.maximum(tl.load(row_amax_ptr + m, mask=m < M, other=1.0), _TINY)
        column_top = tl.maximum(tl.load(column_amax_ptr + k, mask=k < K, other=1.0), _TINY)
        if tile % across == 0:
            tl.store(row_scale_ptr + m, _scale(row_top, LARGEST), mask=m < M)
        if tile // across == 0:
            tl.store(column_scale_ptr + k, _scale(column_top, LARGEST), mask=k < K)
        if ROWS:
            q = _cast(y, row_top[:, None], rows_ptr.dtype.element_ty, LARGEST)
            tl.store(rows_ptr + m[:, None] * K + k[None, :], q, mask=(m[:, None] < M) & (k[None, :] < K))
        if TURNED:
            q = _cast(y, column_top[None, :], turned_ptr.dtype.element_ty, LARGEST)
            at = k.to(tl.int64)[:, None] * padded + m[None, :]
            tl.store(turned_ptr + at, tl.trans(q), mask=(k[:, None] < K) & (m[None, :] < padded))
    else:
        top = tl.maximum(tl.load(column_amax_ptr), _TINY)
        if tile == 0:
            tl.store(column_scale_ptr, _scale(top, LARGEST))
        q = _cast(y, top, rows_ptr.dtype.element_ty, LARGEST)
        if ROWS:
            tl.store(rows_ptr + m[:, None] * K + k[None, :], q, mask=(m[:, None] < M) & (k[None, :] < K))
        if TURNED:
            at = k.to(tl.int64)[:, None] * padded + m[None, :]
            tl.store(turned_ptr + at, tl.trans(q), mask=(k[:, None] < K) & (m[None, :] < padded))
