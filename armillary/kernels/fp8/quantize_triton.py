"""Quantisation to fp8 in Triton: one pass for rows; amax and a transposed cast for columns; padding to multiples of 16.

The tensor cores multiply fp8 only when both operands are contiguous along the summed dim, so the operands of a backward
pass are written transposed while they are quantised.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from armillary.kernels.core.launch import ceil_div, power_of_two, unit_stride
from armillary.kernels.fp8.linear import TINY

# M rows, K columns

_ALIGN = 16
_ROW_IN_REGISTERS = 16384
_ELEMENTS_PER_WARP = 512
# rows, columns and warps of a plain cast and of a transposed one; each row of a tile is at least 128 bytes
_CAST, _TRANSPOSE = (16, 512, 8), (128, 64, 8)
TINY_AMAX = tl.constexpr(TINY)


def quantise(x: Tensor, dtype: torch.dtype, scaling: str, amax: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """fp8 rows [M, K'] and scales [M, 1], or one scale [] (from `amax` where known); K' is K padded with zeros."""
    if scaling == "row":
        return quantise_rows(x, dtype)
    x, q = unit_stride(x), _empty_padded(len(x), x.shape[1], x, dtype)
    amax = amax_of(x, by_column=False) if amax is None else amax
    return q, _cast_tiles(x, q, amax, torch.finfo(dtype).max, q.shape[1], transpose=False)


def quantise_rows(
    x: Tensor, dtype: torch.dtype, norm: Tensor | None = None, gated: bool = False, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """`quantise` with per-row scales, of an RMS norm of x, of SwiGLU over its alternating gate and up, or of x."""
    x, (M, K) = unit_stride(x), (len(x), x.shape[1] // 2 if gated else x.shape[1])
    q, scale = _empty_padded(M, K, x, dtype), torch.empty(M, 1, dtype=torch.float32, device=x.device)
    if q.numel():
        block = min(power_of_two(q.shape[1]), _ROW_IN_REGISTERS)
        row_kernel[(M,)](
            x,
            norm,
            q,
            scale,
            K,
            q.shape[1],
            x.stride(0),
            eps,
            NORM=norm is not None,
            GATED=gated,
            LARGEST=torch.finfo(dtype).max,
            ONE=q.shape[1] <= block,
            BLOCK=block,
            num_warps=max(1, min(16, block // _ELEMENTS_PER_WARP)),
        )
    return q, scale


def _empty_padded(rows: int, columns: int, x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(rows, ceil_div(columns, _ALIGN) * _ALIGN, dtype=dtype, device=x.device)


def quantise_columns(x: Tensor, dtype: torch.dtype, scaling: str, amax: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`quantise` of xᵀ: fp8 [K, M'] and scales [K, 1] or []."""
    x, q = unit_stride(x), _empty_padded(x.shape[1], len(x), x, dtype)
    amax = amax_of(x, by_column=scaling == "row") if amax is None else amax
    scale = _cast_tiles(x, q, amax, torch.finfo(dtype).max, q.shape[1], transpose=True)
    return q, scale if scaling == "tensor" else scale[:, None]


def _cast_tiles(x: Tensor, q: Tensor, amax: Tensor, largest: float, padded: int, *, transpose: bool) -> Tensor:
    """Fill q from x and its amax, one per tensor or one per column; return the scales."""
    (M, K), scale = x.shape, torch.empty_like(amax)
    rows, columns = (padded, K) if transpose else (M, padded)
    block_m, block_k, warps = _TRANSPOSE if transpose else _CAST
    if not q.numel():
        return scale.fill_(TINY / largest)
    cast_kernel[(ceil_div(rows, block_m) * ceil_div(columns, block_k),)](
        x,
        q,
        amax,
        scale,
        M,
        K,
        padded,
        x.stride(0),
        LARGEST=largest,
        TRANSPOSE=transpose,
        BY_COLUMN=amax.dim() == 1,
        BLOCK_M=block_m,
        BLOCK_K=block_k,
        num_warps=warps,
    )
    return scale


def amax_of(x: Tensor, *, by_column: bool) -> Tensor:
    """max |x| of each column or of the tensor; maxima do not depend on their order, so atomics are deterministic."""
    amax = torch.zeros((x.shape[1],) if by_column else (), dtype=torch.float32, device=x.device)
    if x.numel():
        rows = 128
        amax_kernel[(ceil_div(x.shape[1], 512), ceil_div(len(x), rows))](
            x,
            amax,
            len(x),
            x.shape[1],
            x.stride(0),
            BY_COLUMN=by_column,
            ROWS=rows,
            BLOCK_M=8,
            BLOCK_K=512,
            num_warps=8,
        )
    return amax


@triton.jit
def scale_of(amax, LARGEST: tl.constexpr):
    return tl.div_rn(amax, tl.where(amax > 0, LARGEST, LARGEST))  # the constant in amax's shape


@triton.jit
def cast(x, amax, dtype: tl.constexpr, LARGEST: tl.constexpr):
    """Bit-equal to the reference: one division, rounded to nearest, then multiplications."""
    x = x * tl.div_rn(tl.where(amax > 0, LARGEST, LARGEST), amax)
    # the cast saturates, but a value slightly above the largest must not become infinite in E5M2; NaN stays NaN
    x = tl.where(x > LARGEST, LARGEST, tl.where(x < -LARGEST, -LARGEST, x))
    return x.to(dtype)


@triton.jit
def _values(x_ptr, norm_ptr, first, K, inverse, NORM: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr):
    """Part of a row after its norm or activation, rounded to x's dtype."""
    at = first + tl.arange(0, BLOCK)
    if GATED:
        both = 2 * first + tl.arange(0, 2 * BLOCK)
        gate_up = tl.load(x_ptr + both, mask=both < 2 * K, other=0.0).to(tl.float32)
        gate, up = tl.split(tl.reshape(gate_up, (BLOCK, 2)))
        x = gate * tl.sigmoid(gate) * up
    else:
        x = tl.load(x_ptr + at, mask=at < K, other=0.0).to(tl.float32)
    if NORM:
        x = x * inverse * tl.load(norm_ptr + at, mask=at < K, other=0.0).to(tl.float32)
    return x.to(x_ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def _inverse(x_ptr, K, eps, BLOCK: tl.constexpr):
    """1 / √(mean x² + eps) of a row."""
    squares = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, K, BLOCK):
        x = _values(x_ptr, x_ptr, first, K, 1.0, False, False, BLOCK)
        squares += x * x
    return tl.rsqrt(tl.sum(squares, 0) / K + eps)


@triton.jit
def row_kernel(
    x_ptr,
    norm_ptr,
    q_ptr,
    scale_ptr,
    K,
    padded,
    stride,
    eps,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    LARGEST: tl.constexpr,
    ONE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row: producer, amax, scale and cast; a row that fits registers is read once."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride
    q_ptr += row * padded
    at = tl.arange(0, BLOCK)
    inverse = _inverse(x_ptr, K, eps, BLOCK) if NORM else 1.0
    if ONE:
        x = _values(x_ptr, norm_ptr, 0, K, inverse, NORM, GATED, BLOCK)
        top = tl.maximum(tl.max(tl.abs(x), 0), TINY_AMAX)
        tl.store(q_ptr + at, cast(x, top, q_ptr.dtype.element_ty, LARGEST), mask=at < padded)
    else:
        amax = tl.zeros((BLOCK,), tl.float32)
        for first in range(0, K, BLOCK):
            amax = tl.maximum(amax, tl.abs(_values(x_ptr, norm_ptr, first, K, inverse, NORM, GATED, BLOCK)))
        top = tl.maximum(tl.max(amax, 0), TINY_AMAX)
        for first in range(0, padded, BLOCK):
            x = _values(x_ptr, norm_ptr, first, K, inverse, NORM, GATED, BLOCK)
            tl.store(q_ptr + first + at, cast(x, top, q_ptr.dtype.element_ty, LARGEST), mask=first + at < padded)
    tl.store(scale_ptr + row, scale_of(top, LARGEST))


@triton.jit
def amax_kernel(
    x_ptr,
    amax_ptr,
    M,
    K,
    stride,
    BY_COLUMN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Columns of a range of rows."""
    k = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    first = tl.program_id(1).to(tl.int64) * ROWS
    amax = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    for begin in tl.static_range(0, ROWS, BLOCK_M):
        m = first + begin + tl.arange(0, BLOCK_M)
        x = tl.load(x_ptr + m[:, None] * stride + k[None, :], mask=(m[:, None] < M) & (k[None, :] < K), other=0.0)
        amax = tl.maximum(amax, tl.abs(x.to(tl.float32)))
    if BY_COLUMN:
        tl.atomic_max(amax_ptr + k, tl.max(amax, 0), mask=k < K, sem="relaxed")
    else:
        tl.atomic_max(amax_ptr, tl.max(tl.max(amax, 0), 0), sem="relaxed")


@triton.jit
def cast_kernel(
    x_ptr,
    q_ptr,
    amax_ptr,
    scale_ptr,
    M,
    K,
    padded,
    stride,
    LARGEST: tl.constexpr,
    TRANSPOSE: tl.constexpr,
    BY_COLUMN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A tile whose amax is known, as it is or transposed; zeros beyond x. The last tiles come first: `amax_kernel` left
    them in the cache."""
    across = tl.cdiv(K if TRANSPOSE else padded, BLOCK_K)
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    m = (tile // across).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tile % across * BLOCK_K + tl.arange(0, BLOCK_K)
    x = tl.load(x_ptr + m[:, None] * stride + k[None, :], mask=(m[:, None] < M) & (k[None, :] < K), other=0.0)
    x = x.to(tl.float32)
    if BY_COLUMN:
        top = tl.maximum(tl.load(amax_ptr + k, mask=k < K, other=1.0), TINY_AMAX)
        if tile < across:
            tl.store(scale_ptr + k, scale_of(top, LARGEST), mask=k < K)
        q = cast(x, top[None, :], q_ptr.dtype.element_ty, LARGEST)
    else:
        top = tl.maximum(tl.load(amax_ptr), TINY_AMAX)
        if tile == 0:
            tl.store(scale_ptr, scale_of(top, LARGEST))
        q = cast(x, top, q_ptr.dtype.element_ty, LARGEST)
    if TRANSPOSE:
        at = k.to(tl.int64)[:, None] * padded + m[None, :]
        tl.store(q_ptr + at, tl.trans(q), mask=(k[:, None] < K) & (m[None, :] < padded))
    else:
        tl.store(q_ptr + m[:, None] * padded + k[None, :], q, mask=(m[:, None] < M) & (k[None, :] < padded))
