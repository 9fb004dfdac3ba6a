"""fp8 training products with quantisation in Triton: one pass for rows, amax and transposed cast for columns.

The tensor cores multiply fp8 only when both operands are contiguous along the summed dim, so the backward's operands
are written transposed as they are quantised. The products themselves are the library's (`torch._scaled_mm`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from armillary.errors import BadInput
from armillary.kernels.fp8_linear import E4M3, E5M2, SCALINGS, TINY
from armillary.kernels.launch import on

# M rows, K columns; the summed dim is padded to a multiple of 16, which the library wants

_ALIGN = 16
_ROW_IN_REGISTERS = 16384
_TINY = tl.constexpr(TINY)


def fp8_linear(x_MK: Tensor, weight_NK: Tensor, scaling: str = "row") -> Tensor:
    """x @ weightᵀ in fp8, with fp8 gradients."""
    if scaling not in SCALINGS:
        raise BadInput(f"fp8 scaling '{scaling}' is not known; choose {' or '.join(SCALINGS)}")
    return _linear(x_MK.flatten(0, -2), weight_NK, scaling).unflatten(0, x_MK.shape[:-1])


@torch.library.custom_op(
    "armillary::fp8_linear", mutates_args=(), schema="(Tensor x, Tensor weight, str scaling) -> Tensor"
)
def _linear(x: Tensor, weight: Tensor, scaling: str) -> Tensor:
    with on(x):
        return _product(quantise(x, E4M3, scaling), quantise(weight, E4M3, scaling), x.dtype, fast=True)


@_linear.register_fake
def _(x: Tensor, weight: Tensor, scaling: str) -> Tensor:
    return x.new_empty(len(x), len(weight))


@torch.library.custom_op(
    "armillary::fp8_linear_backward", mutates_args=(),
    schema="(Tensor dy, Tensor x, Tensor weight, str scaling, bool grad_x, bool grad_w) -> (Tensor, Tensor)",
)  # fmt: skip
def _gradients(
    dy: Tensor, x: Tensor, weight: Tensor, scaling: str, grad_x: bool, grad_w: bool
) -> tuple[Tensor, Tensor]:
    dx, dw = dy.new_empty(0), dy.new_empty(0)
    with on(x):
        if grad_x:
            dx = _product(quantise(dy, E5M2, scaling), quantise_columns(weight, E4M3, scaling), x.dtype, fast=False)
        if grad_w:
            columns = quantise_columns(dy, E5M2, scaling), quantise_columns(x, E4M3, scaling)
            dw = _product(*columns, weight.dtype, fast=False)
    return dx, dw


@_gradients.register_fake
def _(
    dy: Tensor, x: Tensor, weight: Tensor, scaling: str, grad_x: bool, grad_w: bool
) -> tuple[Tensor, Tensor]:
    return dy.new_empty(x.shape if grad_x else (0,)), dy.new_empty(weight.shape if grad_w else (0,))


def _setup_context(ctx, inputs, output) -> None:
    x, weight, ctx.scaling = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx, dy):
    x, weight = ctx.saved_tensors
    need_x, need_w = ctx.needs_input_grad[:2]
    dx, dw = _gradients(dy, x, weight, ctx.scaling, need_x, need_w)
    return dx if need_x else None, dw if need_w else None, None


_linear.register_autograd(_backward, setup_context=_setup_context)


def _product(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], dtype: torch.dtype, *, fast: bool) -> Tensor:
    """a @ bᵀ of quantised rows; `fast` keeps partial sums in the tensor cores' own, shorter format."""
    (a_q, a_scale), (b_q, b_scale) = a, b
    if not a_q.is_cuda or not a_q.numel():
        return ((a_q.float() * a_scale) @ (b_q.float() * b_scale).t()).to(dtype)
    return torch._scaled_mm(
        a_q, b_q.t(), scale_a=a_scale, scale_b=b_scale.t(), out_dtype=dtype, use_fast_accum=fast
    )  # fmt: skip


# --- quantising


def quantise(x: Tensor, dtype: torch.dtype, scaling: str) -> tuple[Tensor, Tensor]:
    """fp8 rows [M, K'] and scales [M, 1], or one scale []; K' is K padded with zeros."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    (M, K), padded = x.shape, -(-x.shape[1] // _ALIGN) * _ALIGN
    q = torch.empty(M, padded, dtype=dtype, device=x.device)
    largest = torch.finfo(dtype).max
    if scaling == "tensor":
        scale = _tensor_scale(x, largest)
        if q.numel():
            cast_kernel[(triton.cdiv(M, 32), triton.cdiv(padded, 128))](
                x, q, scale, M, K, padded, x.stride(0), LARGEST=largest, TRANSPOSE=False, BY_COLUMN=False,
                BLOCK_M=32, BLOCK_K=128, num_warps=4,
            )  # fmt: skip
        return q, scale
    scale = torch.empty(M, 1, dtype=torch.float32, device=x.device)
    if q.numel():
        block = min(triton.next_power_of_2(padded), _ROW_IN_REGISTERS)
        row_kernel[(M,)](
            x, q, scale, K, padded, x.stride(0), LARGEST=largest, ONE=padded <= block, BLOCK=block,
            num_warps=max(1, min(16, block // 512)),
        )  # fmt: skip
    return q, scale


def quantise_columns(x: Tensor, dtype: torch.dtype, scaling: str) -> tuple[Tensor, Tensor]:
    """The same of xᵀ: fp8 [K, M'] and scales [K, 1] or []."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    (M, K), padded = x.shape, -(-x.shape[0] // _ALIGN) * _ALIGN
    q = torch.empty(K, padded, dtype=dtype, device=x.device)
    largest = torch.finfo(dtype).max
    scale = _tensor_scale(x, largest) if scaling == "tensor" else _column_scales(x, largest)
    if q.numel():
        cast_kernel[(triton.cdiv(padded, 64), triton.cdiv(K, 64))](
            x, q, scale, M, K, padded, x.stride(0), LARGEST=largest, TRANSPOSE=True, BY_COLUMN=scaling == "row",
            BLOCK_M=64, BLOCK_K=64, num_warps=4,
        )  # fmt: skip
    return q, scale


def _tensor_scale(x: Tensor, largest: float) -> Tensor:
    if not x.numel():
        return torch.full((), TINY / largest, dtype=torch.float32, device=x.device)
    return _column_amax(x).amax().clamp_(min=TINY).div_(largest)


def _column_scales(x: Tensor, largest: float) -> Tensor:
    return _column_amax(x).clamp_(min=TINY).div_(largest)[:, None]


def _column_amax(x: Tensor) -> Tensor:
    """max |x| of each column; the order of maxima does not matter, so atomics keep it deterministic."""
    amax = torch.zeros(x.shape[1], dtype=torch.float32, device=x.device)
    if x.numel():
        rows = 256
        amax_kernel[(triton.cdiv(x.shape[1], 256), triton.cdiv(len(x), rows))](
            x, amax, len(x), x.shape[1], x.stride(0), ROWS=rows, BLOCK_M=16, BLOCK_K=256, num_warps=4
        )
    return amax


@triton.jit
def _cast(x, scale, dtype: tl.constexpr, LARGEST: tl.constexpr):
    x = x / scale
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
        scale = tl.maximum(tl.max(tl.abs(x), 0), _TINY) / LARGEST
        tl.store(q_ptr + at, _cast(x, scale, q_ptr.dtype.element_ty, LARGEST), mask=at < padded)
    else:
        amax = tl.zeros((BLOCK,), tl.float32)
        for begin in range(0, K, BLOCK):
            x = tl.load(x_ptr + begin + at, mask=begin + at < K, other=0.0).to(tl.float32)
            amax = tl.maximum(amax, tl.abs(x))
        scale = tl.maximum(tl.max(amax, 0), _TINY) / LARGEST
        for begin in range(0, padded, BLOCK):
            x = tl.load(x_ptr + begin + at, mask=begin + at < K, other=0.0).to(tl.float32)
            tl.store(q_ptr + begin + at, _cast(x, scale, q_ptr.dtype.element_ty, LARGEST), mask=begin + at < padded)
    tl.store(scale_ptr + row, scale)


@triton.jit
def amax_kernel(
    x_ptr, amax_ptr, M, K, stride, ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Columns of a stretch of rows."""
    k = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    first = tl.program_id(1).to(tl.int64) * ROWS
    amax = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    for begin in tl.static_range(0, ROWS, BLOCK_M):
        m = first + begin + tl.arange(0, BLOCK_M)
        x = tl.load(x_ptr + m[:, None] * stride + k[None, :], mask=(m[:, None] < M) & (k[None, :] < K), other=0.0)
        amax = tl.maximum(amax, tl.abs(x.to(tl.float32)))
    tl.atomic_max(amax_ptr + k, tl.max(amax, 0), mask=k < K, sem="relaxed")


@triton.jit
def cast_kernel(
    x_ptr, q_ptr, scale_ptr, M, K, padded, stride,
    LARGEST: tl.constexpr, TRANSPOSE: tl.constexpr, BY_COLUMN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile with scales that are known, as it stands or transposed; beyond x there are zeros."""
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    x = tl.load(x_ptr + m[:, None] * stride + k[None, :], mask=(m[:, None] < M) & (k[None, :] < K), other=0.0)
    scale = tl.load(scale_ptr + k, mask=k < K, other=1.0)[None, :] if BY_COLUMN else tl.load(scale_ptr)
    q = _cast(x.to(tl.float32), scale, q_ptr.dtype.element_ty, LARGEST)
    if TRANSPOSE:
        at = k.to(tl.int64)[:, None] * padded + m[None, :]
        tl.store(q_ptr + at, tl.trans(q), mask=(k[:, None] < K) & (m[None, :] < padded))
    else:
        tl.store(q_ptr + m[:, None] * padded + k[None, :], q, mask=(m[:, None] < M) & (k[None, :] < padded))
