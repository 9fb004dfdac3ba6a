"""fp8 rows computed directly from their source (a norm, an activation, its backward pass, or a plain tensor), and the
same transposed.

A program holds whole rows, so that a row's scale and cast take one pass. Where all rows have one scale, or scales that
are powers of two, the transposed operand is computed from the fp8 rows: only exponents change, and only subnormal
numbers are rounded twice. So the source is read once, and only fp8 afterwards.

Columns with scales of their own take two passes, first the amax of each column, then the cast; nothing is written in
between, so the source values are computed twice.
"""

import triton
import triton.language as tl

from armillary.kernels.fp8.quantize_triton import TINY_AMAX, cast, scale_of
from armillary.kernels.pointwise.activation_triton import act, act_and_slope, gated_act, gated_act_back, through

# M rows, K columns of the source values

_FRACTION: tl.constexpr = tl.constexpr(0x7FFFFF)


@triton.jit
def source_values(
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
    KIND: tl.constexpr,
    ACT: tl.constexpr,
    GATED: tl.constexpr,
    RMS: tl.constexpr,
    WEIGHT: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Columns first … first + BLOCK_K of rows m, in fp32; zeros beyond. A norm's statistics are already known."""
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
            y = _affine(y, weight_ptr, bias_ptr, k, K, WEIGHT, PLUS_ONE, BIAS)
            y = tl.where(inside, y, 0.0)
    return y


@triton.jit
def _affine(y, weight_ptr, bias_ptr, k, K, WEIGHT: tl.constexpr, PLUS_ONE: tl.constexpr, BIAS: tl.constexpr):
    """Apply a norm's weight and bias to normalised rows [M, K]."""
    if WEIGHT:
        weight = tl.load(weight_ptr + k, mask=k < K, other=0.0).to(tl.float32)
        y *= (weight + 1.0 if PLUS_ONE else weight)[None, :]
    if BIAS:
        y += tl.load(bias_ptr + k, mask=k < K, other=0.0).to(tl.float32)[None, :]
    return y


@triton.jit
def _normed(
    x_ptr,
    weight_ptr,
    bias_ptr,
    mean_ptr,
    rstd_ptr,
    m,
    M,
    K,
    x_stride,
    eps,
    RMS: tl.constexpr,
    WEIGHT: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Whole rows of a norm, whose statistics are computed and stored here."""
    k = tl.arange(0, BLOCK)
    there, inside = m < M, (m[:, None] < M) & (k[None, :] < K)
    y = tl.load(x_ptr + m[:, None] * x_stride + k[None, :], mask=inside, other=0.0).to(tl.float32)
    if not RMS:
        mean = tl.sum(y, 1) / K
        tl.store(mean_ptr + m, mean, mask=there)
        y = tl.where(inside, y - mean[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(y * y, 1) / K + eps)
    tl.store(rstd_ptr + m, rstd, mask=there)
    y = _affine(y * rstd[:, None], weight_ptr, bias_ptr, k, K, WEIGHT, PLUS_ONE, BIAS)
    return tl.where(inside, y, 0.0)


@triton.jit
def _power_above(x):
    """The smallest power of two at or above a positive number."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + _FRACTION) & ~_FRACTION).to(tl.float32, bitcast=True)


@triton.jit
def _clamp(x, LARGEST: tl.constexpr):
    """Within the dtype's range; NaN stays NaN."""
    return tl.where(x > LARGEST, LARGEST, tl.where(x < -LARGEST, -LARGEST, x))


@triton.jit
def rows_kernel(
    x_ptr,
    dy_ptr,
    weight_ptr,
    bias_ptr,
    mean_ptr,
    rstd_ptr,
    q_ptr,
    scale_ptr,
    top_ptr,
    M,
    K,
    x_stride,
    dy_stride,
    eps,
    KIND: tl.constexpr,
    ACT: tl.constexpr,
    GATED: tl.constexpr,
    RMS: tl.constexpr,
    WEIGHT: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    BIAS: tl.constexpr,
    MODE: tl.constexpr,
    LARGEST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """fp8 rows and their scales. MODE 'token': powers of two, the largest of which goes to `top`; 'row': so that a
    row's amax becomes the dtype's largest number; 'tensor': one scale, from the amax in `top`, found by 'amax'."""
    m = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, BLOCK)
    there = m < M
    if KIND == "norm":
        y = _normed(
            x_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr, m, M, K, x_stride, eps, RMS, WEIGHT, PLUS_ONE, BIAS, BLOCK
        )
    else:
        y = source_values(
            x_ptr,
            dy_ptr,
            weight_ptr,
            bias_ptr,
            mean_ptr,
            rstd_ptr,
            m,
            0,
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
            ROWS,
            BLOCK,
        )
    most = tl.zeros((ROWS,), tl.float32) + LARGEST  # a tensor, because division by a scalar becomes a reciprocal
    if MODE == "amax":
        tl.atomic_max(top_ptr, tl.max(tl.max(tl.abs(y), 1), 0), sem="relaxed")
    else:
        if MODE == "tensor":
            largest = tl.maximum(tl.load(top_ptr + m * 0), TINY_AMAX)
        else:
            largest = tl.maximum(tl.max(tl.abs(y), 1), TINY_AMAX)
        scale = tl.div_rn(largest, most)
        if MODE == "token":
            scale = _power_above(scale)
            y *= tl.div_rn(tl.zeros((ROWS,), tl.float32) + 1.0, scale)[:, None]
            tl.atomic_max(top_ptr, tl.max(tl.where(there, scale, 0.0), 0), sem="relaxed")
        else:
            y *= tl.div_rn(most, largest)[:, None]
        if MODE == "tensor":
            tl.store(scale_ptr + m * 0, scale, mask=m == 0)
        else:
            tl.store(scale_ptr + m, scale, mask=there)
        q = _clamp(y, LARGEST).to(q_ptr.dtype.element_ty)
        tl.store(q_ptr + m[:, None] * K + k[None, :], q, mask=there[:, None] & (k[None, :] < K))


@triton.jit
def transpose_kernel(
    q_ptr,
    scale_ptr,
    top_ptr,
    transposed_ptr,
    M,
    K,
    padded,
    ONE_SCALE: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A tile of the rows, transposed, with the largest of their scales; zeros beyond the rows. The last tiles come
    first: the previous pass left them in the cache."""
    across = tl.cdiv(K, BLOCK_K)
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    m = (tile // across).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tile % across * BLOCK_K + tl.arange(0, BLOCK_K)
    q = tl.load(q_ptr + m[:, None] * K + k[None, :], mask=(m[:, None] < M) & (k[None, :] < K), other=0.0)
    if not ONE_SCALE:
        share = tl.load(scale_ptr + m, mask=m < M, other=0.0) / tl.load(top_ptr)
        q = _clamp(q.to(tl.float32) * share[:, None], LARGEST).to(transposed_ptr.dtype.element_ty)
    at = k.to(tl.int64)[:, None] * padded + m[None, :]
    tl.store(transposed_ptr + at, tl.trans(q), mask=(k[:, None] < K) & (m[None, :] < padded))


# --- columns with scales of their own


@triton.jit
def columns_amax_kernel(
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
def cast_columns_kernel(
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
