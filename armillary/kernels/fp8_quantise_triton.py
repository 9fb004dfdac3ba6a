"""Quantising to fp8 in Triton: one pass for rows, amax and transposed cast for columns, zeros up to a multiple of 16.

The tensor cores multiply fp8 only when both operands are contiguous along the summed dim, so the operands of a backward
are written transposed as they are quantised.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from armillary.kernels.fp8_linear import TINY
from armillary.kernels.launch import ceil_div, power_of_two

# M rows, K columns

_ALIGN = 16
_ROW_IN_REGISTERS = 16384
_TINY = tl.constexpr(TINY)


def quantise(
    x: Tensor, dtype: torch.dtype, scaling: str, amax: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """fp8 rows [M, K'] and scales [M, 1], or one scale [] (from `amax` where known); K' is K padded with zeros."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    (M, K), padded = x.shape, ceil_div(x.shape[1], _ALIGN) * _ALIGN
    q = torch.empty(M, padded, dtype=dtype, device=x.device)
    largest = torch.finfo(dtype).max
    if scaling == "tensor":
        amax = amax_of(x, by_column=False) if amax is None else amax
        return q, _cast_tiles(x, q, amax, largest, padded, transpose=False)
    scale = torch.empty(M, 1, dtype=torch.float32, device=x.device)
    if q.numel():
        block = min(power_of_two(padded), _ROW_IN_REGISTERS)
        row_kernel[(M,)](
            x, q, scale, K, padded, x.stride(0), LARGEST=largest, ONE=padded <= block, BLOCK=block,
            num_warps=max(1, min(16, block // 512)),
        )  # fmt: skip
    return q, scale


def quantise_columns(
    x: Tensor, dtype: torch.dtype, scaling: str, amax: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The same of xᵀ: fp8 [K, M'] and scales [K, 1] or []."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    padded = ceil_div(len(x), _ALIGN) * _ALIGN
    q = torch.empty(x.shape[1], padded, dtype=dtype, device=x.device)
    amax = amax_of(x, by_column=scaling == "row") if amax is None else amax
    scale = _cast_tiles(x, q, amax, torch.finfo(dtype).max, padded, transpose=True)
    return q, scale if scaling == "tensor" else scale[:, None]


def _cast_tiles(x: Tensor, q: Tensor, amax: Tensor, largest: float, padded: int, *, transpose: bool) -> Tensor:
    """Fills q from x and its largest values, one for all or one a column; returns the scales."""
    (M, K), scale = x.shape, torch.empty_like(amax)
    rows, columns = (padded, K) if transpose else (M, padded)
    block_m, block_k = (128, 64) if transpose else (16, 512)  # 128 bytes and more are written in a row
    if not q.numel():
        return scale.fill_(TINY / largest)
    cast_kernel[(ceil_div(rows, block_m), ceil_div(columns, block_k))](
        x, q, amax, scale, M, K, padded, x.stride(0), LARGEST=largest, TRANSPOSE=transpose, BY_COLUMN=amax.dim() == 1,
        BLOCK_M=block_m, BLOCK_K=block_k, num_warps=8,
    )  # fmt: skip
    return scale


def amax_of(x: Tensor, *, by_column: bool) -> Tensor:
    """max |x| of each column or of all; the order of maxima does not matter, so atomics keep it deterministic."""
    amax = torch.zeros((x.shape[1],) if by_column else (), dtype=torch.float32, device=x.device)
    if x.numel():
        rows = 128
        amax_kernel[(ceil_div(x.shape[1], 512), ceil_div(len(x), rows))](
            x, amax, len(x), x.shape[1], x.stride(0), BY_COLUMN=by_column, ROWS=rows, BLOCK_M=8, BLOCK_K=512,
            num_warps=8,
        )  # fmt: skip
    return amax


@triton.jit
def _scale(amax, LARGEST: tl.constexpr):
    return tl.div_rn(amax, tl.where(amax > 0, LARGEST, LARGEST))  # the constant in amax's shape


@triton.jit
def _cast(x, amax, dtype: tl.constexpr, LARGEST: tl.constexpr):
    """As the reference rounds, to the bit: one division, rounded to nearest, then products."""
    x = x * tl.div_rn(tl.where(amax > 0, LARGEST, LARGEST), amax)
    # saturates by itself, but a value a hair above the largest must not become infinite in E5M2; NaN stays NaN
    x = tl.where(x > LARGEST, LARGEST, tl.where(x < -LARGEST, -LARGEST, x))
    return x.to(dtype)


@triton.jit
def row_kernel(
    x_ptr, q_ptr, scale_ptr, K, padded, stride, LARGEST: tl.constexpr, ONE: tl.constexpr, BLOCK: tl.constexpr
):
    """A program a row: amax, scale and cast; a row that fits registers is read once."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride
    q_ptr += row * padded
    at = tl.arange(0, BLOCK)
    if ONE:
        x = tl.load(x_ptr + at, mask=at < K, other=0.0).to(tl.float32)
        top = tl.maximum(tl.max(tl.abs(x), 0), _TINY)
        tl.store(q_ptr + at, _cast(x, top, q_ptr.dtype.element_ty, LARGEST), mask=at < padded)
    else:
        amax = tl.zeros((BLOCK,), tl.float32)
        for begin in range(0, K, BLOCK):
            x = tl.load(x_ptr + begin + at, mask=begin + at < K, other=0.0).to(tl.float32)
            amax = tl.maximum(amax, tl.abs(x))
        top = tl.maximum(tl.max(amax, 0), _TINY)
        for begin in range(0, padded, BLOCK):
            x = tl.load(x_ptr + begin + at, mask=begin + at < K, other=0.0).to(tl.float32)
            tl.store(q_ptr + begin + at, _cast(x, top, q_ptr.dtype.element_ty, LARGEST), mask=begin + at < padded)
    tl.store(scale_ptr + row, _scale(top, LARGEST))


@triton.jit
def amax_kernel(
    x_ptr, amax_ptr, M, K, stride,
    BY_COLUMN: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Columns of a stretch of rows."""
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
    x_ptr, q_ptr, amax_ptr, scale_ptr, M, K, padded, stride,
    LARGEST: tl.constexpr, TRANSPOSE: tl.constexpr, BY_COLUMN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile whose largest values are known, as it stands or transposed; beyond x there are zeros."""
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    x = tl.load(x_ptr + m[:, None] * stride + k[None, :], mask=(m[:, None] < M) & (k[None, :] < K), other=0.0)
    x = x.to(tl.float32)
    if BY_COLUMN:
        top = tl.maximum(tl.load(amax_ptr + k, mask=k < K, other=1.0), _TINY)
        if tl.program_id(0) == 0:
            tl.store(scale_ptr + k, _scale(top, LARGEST), mask=k < K)
        q = _cast(x, top[None, :], q_ptr.dtype.element_ty, LARGEST)
    else:
        top = tl.maximum(tl.load(amax_ptr), _TINY)
        if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
            tl.store(scale_ptr, _scale(top, LARGEST))
        q = _cast(x, top, q_ptr.dtype.element_ty, LARGEST)
    if TRANSPOSE:
        at = k.to(tl.int64)[:, None] * padded + m[None, :]
        tl.store(q_ptr + at, tl.trans(q), mask=(k[:, None] < K) & (m[None, :] < padded))
    else:
        tl.store(q_ptr + m[:, None] * padded + k[None, :], q, mask=(m[:, None] < M) & (k[None, :] < padded))
