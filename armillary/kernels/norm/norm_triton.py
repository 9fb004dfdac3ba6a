"""RMSNorm and LayerNorm in Triton, forward and backward, with an optional residual added in the same kernel.

Forward: a program holds whole rows. Backward: a persistent grid goes over the rows, each program sums the weight's
gradient for its own rows, and a second kernel adds those sums in a fixed order, so that results are deterministic. Rows
too wide for the registers are processed in pieces.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from armillary.kernels.core.launch import as_rows, can_start_early, ceil_div, dense, fitting_stages, num_programs, on
from armillary.kernels.core.reductions_triton import column_sums
from armillary.kernels.norm.launch_config import backward_shape, forward_shape, reads_twice
from armillary.kernels.norm.rows_triton import backward_kernel, forward_kernel
from armillary.kernels.norm.wide_rows_triton import backward_wide_kernel, forward_wide_kernel, weights_wide_kernel

# columns that a program holds; two sums are those of weight and bias
WIDEST_FORWARD, WIDEST_BACKWARD, WIDEST_TWO_SUMS = 32768, 16384, 12288
_PIECE = 4096


def norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    kind: str = "rms",
    plus_one: bool = False,
    *,
    alternative: bool = False,
) -> Tensor:
    """norm.norm in one kernel; `alternative` launch shapes are better for some widths and devices."""
    return _norm(x, None, weight, bias, eps, kind == "rms", plus_one, alternative)[0]


def add_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    kind: str = "rms",
    plus_one: bool = False,
    *,
    alternative: bool = False,
) -> tuple[Tensor, Tensor]:
    """norm.add_norm in one kernel."""
    if x.dtype != residual.dtype:  # a wider residual stream makes the sum as wide
        wider = torch.promote_types(x.dtype, residual.dtype)
        x, residual = x.to(wider), residual.to(wider)
    y, summed, _, _ = _norm(x, residual.expand_as(x), weight, bias, eps, kind == "rms", plus_one, alternative)
    return y, summed


norm_pairs, add_norm_pairs = partial(norm, alternative=True), partial(add_norm, alternative=True)


# --- custom ops, so that torch.compile and CUDA graphs treat each as one operator


@torch.library.custom_op(
    "armillary::norm",
    mutates_args=(),
    schema="(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps, bool rms, bool plus_one,"
    " bool alternative) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    rms: bool,
    plus_one: bool,
    alternative: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(normed, summed or empty, mean or empty, 1 / standard deviation)."""
    y, summed, mean, rstd = _empty_norm(x, residual, weight, bias, eps, rms, plus_one, alternative)
    x_MN, weight, bias = as_rows(x), dense(weight), dense(bias)
    rows, columns = x_MN.shape
    if not x.numel():
        return y, summed, mean, rstd
    residual_MN = x_MN if residual is None else as_rows(residual)
    flags = {
        "RMS": rms,
        "WEIGHT": weight is not None,
        "PLUS_ONE": plus_one,
        "BIAS": bias is not None,
        "RESIDUAL": residual is not None,
    }
    arguments = (
        x_MN,
        residual_MN,
        weight,
        bias,
        y,
        summed,
        mean,
        rstd,
        rows,
        columns,
        x_MN.stride(0),
        residual_MN.stride(0),
        eps,
    )
    with on(x):
        fits_twice = rms and residual is None and reads_twice(columns, x.element_size(), alternative)
        if columns > WIDEST_FORWARD or fits_twice:
            warps = 8 if columns > WIDEST_FORWARD else 16
            forward_wide_kernel[(rows,)](*arguments, **flags, BLOCK=_PIECE, num_warps=warps)
        else:
            shape = forward_shape(
                columns, x.element_size(), alternative, centred=not rms, residual=residual is not None
            )
            pieces = ceil_div(columns, shape.width)
            arrays = 1 + (residual is not None) + (weight is not None) + (bias is not None)
            stage_bytes = arrays * shape.rows * pieces * shape.width * x.element_size()
            programs = ceil_div(rows, shape.rows)
            if shape.programs:
                programs = min(programs, num_programs(x, shape.programs))
            forward_kernel[(programs,)](
                *arguments,
                **flags,
                PIECES=pieces,
                WIDTH=shape.width,
                ROWS=shape.rows,
                STAGES=fitting_stages(x, stage_bytes, shape.stages),
                MASKED=bool(columns % shape.width or rows % shape.rows),
                num_warps=shape.warps,
            )
    return y, summed, mean, rstd


@_norm.register_fake
def _empty_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    rms: bool,
    plus_one: bool,
    alternative: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = x.numel() // x.shape[-1] if x.shape[-1] else 0
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    summed = torch.empty_like(y) if residual is not None else x.new_empty(0)
    mean = x.new_empty(0 if rms else rows, dtype=torch.float32)
    return y, summed, mean, x.new_empty(rows, dtype=torch.float32)


@torch.library.custom_op(
    "armillary::norm_backward",
    mutates_args=(),
    schema="(Tensor dy, Tensor? dsummed, Tensor x, Tensor? weight, Tensor mean, Tensor rstd, bool plus_one, bool bias,"
    " bool alternative) -> (Tensor, Tensor, Tensor)",
)
def _norm_backward(
    dy: Tensor,
    dsummed: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    plus_one: bool,
    bias: bool,
    alternative: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(gradient of x, of weight or empty, of bias or empty)."""
    dx, dw, db = _empty_norm_backward(dy, dsummed, x, weight, mean, rstd, plus_one, bias, alternative)
    if not x.numel():
        return dx, dw.zero_(), db.zero_()
    dy_MN, x_MN, weight = as_rows(dy), as_rows(x), dense(weight)
    rows, columns = x_MN.shape
    dsummed_MN = dy_MN if dsummed is None else as_rows(dsummed)
    flags = {
        "RMS": not mean.numel(),
        "WEIGHT": weight is not None,
        "PLUS_ONE": plus_one,
        "BIAS": bias,
        "RESIDUAL": dsummed is not None,
    }
    strides = (dy_MN.stride(0), dsummed_MN.stride(0), x_MN.stride(0))
    if columns > (WIDEST_TWO_SUMS if weight is not None and bias else WIDEST_BACKWARD):
        _wide_backward(dy_MN, dsummed_MN, x_MN, weight, mean, rstd, dx, dw, db, strides, flags)
        return dx, dw, db
    sums = [out for out, there in ((dw, weight is not None), (db, bias)) if there]
    shape = backward_shape(columns, x.element_size(), alternative, sums=len(sums))
    pieces = ceil_div(columns, shape.width)
    column_bytes = shape.rows * (2 + (dsummed is not None)) * x.element_size()
    if weight is not None and not shape.ahead:
        column_bytes += weight.element_size()
    stages = fitting_stages(x, pieces * shape.width * column_bytes, shape.stages)
    programs = ceil_div(rows, shape.rows)
    if shape.programs:
        programs = min(programs, num_programs(x, shape.programs))
    parts = x.new_empty(len(sums), programs, columns, dtype=torch.float32)
    with on(x):
        backward_kernel[(programs,)](
            dy_MN,
            dsummed_MN,
            x_MN,
            weight,
            mean,
            rstd,
            dx,
            parts,
            rows,
            columns,
            *strides,
            **flags,
            PIECES=pieces,
            WIDTH=shape.width,
            ROWS=shape.rows,
            STAGES=stages,
            MASKED=bool(columns % shape.width or rows % shape.rows),
            AHEAD=shape.ahead,
            EARLY=bool(sums) and can_start_early(x.device),
            num_warps=shape.warps,
        )
    if sums:
        column_sums(parts, *sums)
    return dx, dw, db


@_norm_backward.register_fake
def _empty_norm_backward(
    dy: Tensor,
    dsummed: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    plus_one: bool,
    bias: bool,
    alternative: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    dw = x.new_empty(0) if weight is None else torch.empty_like(weight)
    db = x.new_empty(x.shape[-1] if bias else 0, dtype=torch.float32 if weight is None else weight.dtype)
    return dx, dw, db


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, residual, weight, bias, _, _, ctx.plus_one, ctx.alternative = inputs
    _, summed, mean, rstd = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(mean, rstd)
    ctx.has_residual, ctx.bias_dtype = residual is not None, None if bias is None else bias.dtype
    ctx.save_for_backward(x if residual is None else summed, weight, mean, rstd)


def _gradients(ctx: Any, dy: Tensor | None, dsummed: Tensor | None, *_: Any) -> tuple[Any, ...]:
    x, weight, mean, rstd = ctx.saved_tensors
    none, has_bias = (None,) * 4, ctx.bias_dtype is not None
    if dy is None:  # only the sum was used
        return dsummed, dsummed, None, None, *none
    if not ctx.has_residual:
        dsummed = None
    dx, dw, db = _norm_backward(dy, dsummed, x, weight, mean, rstd, ctx.plus_one, has_bias, ctx.alternative)
    return (
        dx,
        dx if ctx.has_residual else None,
        None if weight is None else dw,
        db.to(ctx.bias_dtype) if has_bias else None,
        *none,
    )


_norm.register_autograd(_gradients, setup_context=_setup_context)


def _wide_backward(
    dy_MN: Tensor,
    dsummed_MN: Tensor,
    x_MN: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    dx: Tensor,
    dw: Tensor,
    db: Tensor,
    strides: tuple[int, int, int],
    flags: dict[str, bool],
) -> None:
    """Rows in pieces for dx, then blocks of columns for the weights: x and dy are read from memory twice."""
    rows, columns = x_MN.shape
    with on(x_MN):
        backward_wide_kernel[(rows,)](
            dy_MN,
            dsummed_MN,
            x_MN,
            weight,
            mean,
            rstd,
            dx,
            dw,
            db,
            rows,
            columns,
            *strides,
            **flags,
            BLOCK=_PIECE,
            num_warps=8,
        )
        if flags["WEIGHT"] or flags["BIAS"]:
            weights_wide_kernel[(ceil_div(columns, 64),)](
                dy_MN,
                x_MN,
                mean,
                rstd,
                dw,
                db,
                rows,
                columns,
                strides[0],
                strides[2],
                RMS=flags["RMS"],
                WEIGHT=flags["WEIGHT"],
                BIAS=flags["BIAS"],
                ROWS=64,
                BLOCK=64,
                num_warps=4,
            )
