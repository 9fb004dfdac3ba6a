"""RMSNorm and LayerNorm in Triton, forward and backward, with a residual added on the way where there is one.

Forward: a program holds whole rows. Backward: as many programs as run at once go over the rows, each summing the
weight's gradient for its own, and a second kernel adds those sums in a fixed order, so that results are the same every
time. Rows too wide for the registers are gone over in pieces.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from armillary.kernels.column_sums_triton import column_sums
from armillary.kernels.launch import as_rows, ceil_div, num_programs, on, power_of_two

WIDEST_FORWARD, WIDEST_BACKWARD = 32768, 16384
"""columns that a program can hold"""
_PIECE = 4096


def norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, kind: str = "rms", plus_one: bool = False
) -> Tensor:
    """norm.norm in one kernel."""
    return _norm(x, None, weight, bias, eps, kind == "rms", plus_one)[0]


def add_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, kind: str = "rms",
    plus_one: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """norm.add_norm in one kernel."""
    y, summed, _, _ = _norm(x, residual, weight, bias, eps, kind == "rms", plus_one)
    return y, summed


# --- custom ops, so that torch.compile and CUDA graphs take them whole


@torch.library.custom_op(
    "armillary::norm", mutates_args=(),
    schema="(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps, bool rms, bool plus_one)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)  # fmt: skip
def _norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, rms: bool,
    plus_one: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(normed, summed or empty, mean or empty, 1 / deviation)."""
    y, summed, mean, rstd = _empty_norm(x, residual, weight, bias, eps, rms, plus_one)
    x_MN = as_rows(x)
    rows, columns = x_MN.shape
    if not x.numel():
        return y, summed, mean, rstd
    residual_MN = x_MN if residual is None else as_rows(residual)
    wide = columns > WIDEST_FORWARD
    block = _PIECE if wide else power_of_two(columns)
    held, warps = _forward_shape(block)
    flags = {
        "RMS": rms, "WEIGHT": weight is not None, "PLUS_ONE": plus_one, "BIAS": bias is not None,
        "RESIDUAL": residual is not None, "BLOCK": block,
    }  # fmt: skip
    arguments = (
        x_MN, residual_MN, weight, bias, y, summed, mean, rstd, rows, columns, x_MN.stride(0), residual_MN.stride(0),
        eps,
    )  # fmt: skip
    with on(x):
        if wide:
            _forward_wide_kernel[(rows,)](*arguments, **flags, num_warps=8)
        else:
            _forward_kernel[(ceil_div(rows, held),)](*arguments, **flags, HELD=held, num_warps=warps)
    return y, summed, mean, rstd


@_norm.register_fake
def _empty_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, rms: bool,
    plus_one: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    rows = x.numel() // x.shape[-1] if x.shape[-1] else 0
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    summed = torch.empty_like(y) if residual is not None else x.new_empty(0)
    mean = x.new_empty(0 if rms else rows, dtype=torch.float32)
    return y, summed, mean, x.new_empty(rows, dtype=torch.float32)


@torch.library.custom_op(
    "armillary::norm_backward", mutates_args=(),
    schema="(Tensor dy, Tensor? dsummed, Tensor x, Tensor? weight, Tensor mean, Tensor rstd, bool plus_one, bool bias)"
    " -> (Tensor, Tensor, Tensor)",
)  # fmt: skip
def _norm_backward(
    dy: Tensor, dsummed: Tensor | None, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, plus_one: bool,
    bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(gradient of x, of weight or empty, of bias or empty)."""
    dx, dw, db = _empty_norm_backward(dy, dsummed, x, weight, mean, rstd, plus_one, bias)
    if not x.numel():
        return dx, dw.zero_(), db.zero_()
    dy_MN, x_MN = as_rows(dy), as_rows(x)
    rows, columns = x_MN.shape
    dsummed_MN = dy_MN if dsummed is None else as_rows(dsummed)
    wide = columns > WIDEST_BACKWARD
    block = _PIECE if wide else power_of_two(columns)
    held, warps, per_multiprocessor, stages, hold = _backward_shape(block)
    programs = min(num_programs(x, per_multiprocessor), ceil_div(rows, held))
    dw_PN, db_PN = (
        x.new_empty(programs if there and not wide else 0, columns, dtype=torch.float32)
        for there in (weight is not None, bias)
    )
    arguments = (
        dy_MN, dsummed_MN, x_MN, weight, mean, rstd, dx, dw_PN, db_PN, rows, columns, dy_MN.stride(0),
        dsummed_MN.stride(0), x_MN.stride(0),
    )  # fmt: skip
    flags = {
        "RMS": not mean.numel(), "WEIGHT": weight is not None, "PLUS_ONE": plus_one, "BIAS": bias,
        "RESIDUAL": dsummed is not None, "BLOCK": block,
    }  # fmt: skip
    with on(x):
        if wide:
            _backward_wide_kernel[(rows,)](*arguments, **flags, num_warps=8)
            grid = (ceil_div(columns, 64),)
            _weights_wide_kernel[grid](
                dy_MN, x_MN, mean, rstd, dw, db, rows, columns, dy_MN.stride(0), x_MN.stride(0), RMS=flags["RMS"],
                WEIGHT=weight is not None, BIAS=bias, ROWS=64, BLOCK=64, num_warps=4,
            )  # fmt: skip
            return dx, dw, db
        _backward_kernel[(programs,)](*arguments, **flags, HELD=held, STAGES=stages, HOLD=hold, num_warps=warps)
    if weight is not None:
        column_sums(dw_PN, dw)
    if bias:
        column_sums(db_PN, db)
    return dx, dw, db


@_norm_backward.register_fake
def _empty_norm_backward(
    dy: Tensor, dsummed: Tensor | None, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, plus_one: bool,
    bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    dw = x.new_empty(0) if weight is None else torch.empty_like(weight)
    return dx, dw, x.new_empty(x.shape[-1] if bias else 0)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, residual, weight, bias, _, _, ctx.plus_one = inputs
    _, summed, mean, rstd = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(mean, rstd)
    ctx.has_residual, ctx.has_bias = residual is not None, bias is not None
    ctx.save_for_backward(x if residual is None else summed, weight, mean, rstd)


def _gradients(ctx: Any, dy: Tensor | None, dsummed: Tensor | None, *_: Any) -> tuple[Any, ...]:
    x, weight, mean, rstd = ctx.saved_tensors
    none = (None,) * 3
    if dy is None:  # only the sum was used
        return dsummed, dsummed, None, None, *none
    if not ctx.has_residual:
        dsummed = None
    dx, dw, db = _norm_backward(dy, dsummed, x, weight, mean, rstd, ctx.plus_one, ctx.has_bias)
    return (dx, dx if ctx.has_residual else None, None if weight is None else dw, db if ctx.has_bias else None, *none)


_norm.register_autograd(_gradients, setup_context=_keep)


# --- launch shapes


def _forward_shape(block: int) -> tuple[int, int]:
    """Rows a program holds, and warps: small rows share a program."""
    held = max(1, 2048 // block)
    return held, min(32, max(4, block * held // 1024))


def _backward_shape(block: int) -> tuple[int, int, int, int, bool]:
    """Rows a program holds at a time, warps, programs a multiprocessor, rows loaded ahead, whether weights are held."""
    held = max(1, 1024 // block)
    warps = min(16, max(4, block * held // 512))
    return held, warps, max(1, 16 // warps), 2, block <= 8192


# --- kernels


@triton.jit
def _forward_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, summed_ptr, mean_ptr, rstd_ptr, rows, columns, x_stride,
    residual_stride, eps, RMS: tl.constexpr, WEIGHT: tl.constexpr, PLUS_ONE: tl.constexpr, BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr, BLOCK: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * HELD + tl.arange(0, HELD)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < columns)
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0)
    at = row * columns + column
    if RESIDUAL:
        residual = tl.load(residual_ptr + row * residual_stride + column, mask=inside, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(summed_ptr + at, x, mask=inside)
    wide = x.to(tl.float32)
    if not RMS:
        mean = tl.sum(wide, axis=1, keep_dims=True) / columns
        tl.store(mean_ptr + row, mean, mask=row < rows)
        wide = tl.where(inside, wide - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(wide * wide, axis=1, keep_dims=True) / columns + eps)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)
    y = wide * rstd
    if WEIGHT:
        weight = tl.load(weight_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
        y *= weight + 1.0 if PLUS_ONE else weight
    if BIAS:
        y += tl.load(bias_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _wide_load(x_ptr, residual_ptr, x_at, residual_at, inside, RESIDUAL: tl.constexpr):
    """A piece of a row, the residual added and rounded as it is stored."""
    x = tl.load(x_ptr + x_at, mask=inside, other=0.0)
    if RESIDUAL:
        x = (x.to(tl.float32) + tl.load(residual_ptr + residual_at, mask=inside, other=0.0).to(tl.float32)).to(x.dtype)
    return x


@triton.jit
def _forward_wide_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, summed_ptr, mean_ptr, rstd_ptr, rows, columns, x_stride,
    residual_stride, eps, RMS: tl.constexpr, WEIGHT: tl.constexpr, PLUS_ONE: tl.constexpr, BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    residual_ptr += row * residual_stride
    sums = tl.zeros([BLOCK], tl.float32)
    mean = 0.0
    if not RMS:
        for start in range(0, columns, BLOCK):
            at = start + tl.arange(0, BLOCK)
            sums += _wide_load(x_ptr, residual_ptr, at, at, at < columns, RESIDUAL).to(tl.float32)
        mean = tl.sum(sums) / columns
        tl.store(mean_ptr + row, mean)
        sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = _wide_load(x_ptr, residual_ptr, at, at, at < columns, RESIDUAL).to(tl.float32)
        x = tl.where(at < columns, x - mean, 0.0)
        sums += x * x
    rstd = tl.rsqrt(tl.sum(sums) / columns + eps)
    tl.store(rstd_ptr + row, rstd)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < columns
        x = _wide_load(x_ptr, residual_ptr, at, at, inside, RESIDUAL)
        if RESIDUAL:
            tl.store(summed_ptr + row * columns + at, x, mask=inside)
        y = (x.to(tl.float32) - mean) * rstd
        if WEIGHT:
            weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
            y *= weight + 1.0 if PLUS_ONE else weight
        if BIAS:
            y += tl.load(bias_ptr + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(y_ptr + row * columns + at, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(
    dy_ptr, dsummed_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, dw_ptr, db_ptr, rows, columns, dy_stride,
    dsummed_stride, x_stride, RMS: tl.constexpr, WEIGHT: tl.constexpr, PLUS_ONE: tl.constexpr, BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr, BLOCK: tl.constexpr, HELD: tl.constexpr, STAGES: tl.constexpr,
    HOLD: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)[None, :]
    if WEIGHT and HOLD:
        weight = tl.load(weight_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
    dw = tl.zeros([HELD, BLOCK], tl.float32)
    db = tl.zeros([HELD, BLOCK], tl.float32)
    for block in tl.range(program, tl.cdiv(rows, HELD), tl.num_programs(0), num_stages=STAGES):
        row = block * HELD + tl.arange(0, HELD).to(tl.int64)[:, None]
        inside = (row < rows) & (column < columns)
        x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * dy_stride + column, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
        if not RMS:
            x = x - tl.load(mean_ptr + row, mask=row < rows, other=0.0)
        normed = x * rstd
        if BIAS:
            db += dy
        if WEIGHT:
            dw += dy * normed
            if not HOLD:
                weight = tl.load(weight_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
            dy = dy * (weight + 1.0) if PLUS_ONE else dy * weight
        dx = dy - normed * (tl.sum(dy * normed, axis=1, keep_dims=True) / columns)
        if not RMS:
            dx -= tl.sum(dy, axis=1, keep_dims=True) / columns
        dx *= rstd
        if RESIDUAL:
            dx += tl.load(dsummed_ptr + row * dsummed_stride + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx_ptr + row * columns + column, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    at = program.to(tl.int64) * columns + tl.arange(0, BLOCK)
    if WEIGHT:
        tl.store(dw_ptr + at, tl.sum(dw, axis=0), mask=tl.arange(0, BLOCK) < columns)
    if BIAS:
        tl.store(db_ptr + at, tl.sum(db, axis=0), mask=tl.arange(0, BLOCK) < columns)


@triton.jit
def _backward_wide_kernel(
    dy_ptr, dsummed_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, dw_ptr, db_ptr, rows, columns, dy_stride,
    dsummed_stride, x_stride, RMS: tl.constexpr, WEIGHT: tl.constexpr, PLUS_ONE: tl.constexpr, BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row's gradient in two passes of pieces; the weights' come from _weights_wide_kernel."""
    row = tl.program_id(0).to(tl.int64)
    rstd = tl.load(rstd_ptr + row)
    mean = 0.0
    if not RMS:
        mean = tl.load(mean_ptr + row)
    along = tl.zeros([BLOCK], tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < columns
        normed = (tl.load(x_ptr + row * x_stride + at, mask=inside, other=0.0).to(tl.float32) - mean) * rstd
        dy = tl.load(dy_ptr + row * dy_stride + at, mask=inside, other=0.0).to(tl.float32)
        if WEIGHT:
            weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
            dy *= weight + 1.0 if PLUS_ONE else weight
        along += dy * normed
        total += dy
    mean_along = tl.sum(along) / columns
    mean_total = 0.0
    if not RMS:
        mean_total = tl.sum(total) / columns
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < columns
        normed = (tl.load(x_ptr + row * x_stride + at, mask=inside, other=0.0).to(tl.float32) - mean) * rstd
        dy = tl.load(dy_ptr + row * dy_stride + at, mask=inside, other=0.0).to(tl.float32)
        if WEIGHT:
            weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
            dy *= weight + 1.0 if PLUS_ONE else weight
        dx = (dy - normed * mean_along - mean_total) * rstd
        if RESIDUAL:
            dx += tl.load(dsummed_ptr + row * dsummed_stride + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx_ptr + row * columns + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _weights_wide_kernel(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr, dw_ptr, db_ptr, rows, columns, dy_stride, x_stride, RMS: tl.constexpr,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradients of weight and bias for a block of columns, over all rows."""
    column = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
    dw = tl.zeros([ROWS, BLOCK], tl.float32)
    db = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS).to(tl.int64)[:, None]
        inside = (row < rows) & (column < columns)
        dy = tl.load(dy_ptr + row * dy_stride + column, mask=inside, other=0.0).to(tl.float32)
        db += dy
        if WEIGHT:
            x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
            if not RMS:
                x -= tl.load(mean_ptr + row, mask=row < rows, other=0.0)
            dw += dy * x * tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
    there = column < columns
    if WEIGHT:
        total = tl.sum(dw, axis=0, keep_dims=True)
        tl.store(dw_ptr + column, total.to(dw_ptr.dtype.element_ty), mask=there)
    if BIAS:
        total = tl.sum(db, axis=0, keep_dims=True)
        tl.store(db_ptr + column, total.to(db_ptr.dtype.element_ty), mask=there)
