"""Norm kernels that hold whole rows, as one tile of columns or two (so that 12,288 are 8,192 and 4,096, not 16,384).

Programs go over the rows in turn, the next rows being loaded meanwhile. The backward sums the gradients of weight and
bias for the rows of its program; column_sums adds those up.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _read(x_ptr, residual_ptr, summed_ptr, row, column, rows, columns, x_stride, residual_stride,
          RESIDUAL: tl.constexpr):  # fmt: skip
    """A tile in fp32; with a residual the sum, rounded as it is stored."""
    inside = (row < rows) & (column < columns)
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0)
    if RESIDUAL:
        residual = tl.load(residual_ptr + row * residual_stride + column, mask=inside, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(summed_ptr + row * columns + column, x, mask=inside)
    return x.to(tl.float32)


@triton.jit
def _less(x, mean, column, columns):
    """The tile less its mean, 0 beyond the columns."""
    return tl.where(column < columns, x - mean, 0.0)


@triton.jit
def _write(y_ptr, weight_ptr, bias_ptr, x, rstd, row, column, rows, columns, WEIGHT: tl.constexpr,
           PLUS_ONE: tl.constexpr, BIAS: tl.constexpr):  # fmt: skip
    y = x * rstd
    if WEIGHT:
        weight = tl.load(weight_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
        y *= weight + 1.0 if PLUS_ONE else weight
    if BIAS:
        y += tl.load(bias_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * columns + column, y.to(y_ptr.dtype.element_ty), mask=(row < rows) & (column < columns))


@triton.jit
def forward_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, summed_ptr, mean_ptr, rstd_ptr, rows, columns, x_stride,
    residual_stride, eps, RMS: tl.constexpr, WEIGHT: tl.constexpr, PLUS_ONE: tl.constexpr, BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, HELD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    first = tl.arange(0, FIRST)[None, :]
    for block in tl.range(tl.program_id(0), tl.cdiv(rows, HELD), tl.num_programs(0), num_stages=STAGES):
        row = block * HELD + tl.arange(0, HELD).to(tl.int64)[:, None]
        a = _read(x_ptr, residual_ptr, summed_ptr, row, first, rows, columns, x_stride, residual_stride, RESIDUAL)
        if SECOND:
            second = FIRST + tl.arange(0, SECOND)[None, :]
            b = _read(x_ptr, residual_ptr, summed_ptr, row, second, rows, columns, x_stride, residual_stride, RESIDUAL)
        if not RMS:
            total = tl.sum(a, axis=1, keep_dims=True)
            if SECOND:
                total += tl.sum(b, axis=1, keep_dims=True)
            mean = total / columns
            tl.store(mean_ptr + row, mean, mask=row < rows)
            a = _less(a, mean, first, columns)
            if SECOND:
                b = _less(b, mean, second, columns)
        squares = tl.sum(a * a, axis=1, keep_dims=True)
        if SECOND:
            squares += tl.sum(b * b, axis=1, keep_dims=True)
        rstd = tl.rsqrt(squares / columns + eps)
        tl.store(rstd_ptr + row, rstd, mask=row < rows)
        _write(y_ptr, weight_ptr, bias_ptr, a, rstd, row, first, rows, columns, WEIGHT, PLUS_ONE, BIAS)
        if SECOND:
            _write(y_ptr, weight_ptr, bias_ptr, b, rstd, row, second, rows, columns, WEIGHT, PLUS_ONE, BIAS)


@triton.jit
def _taken(dy_ptr, x_ptr, weight_ptr, dw, db, mean, rstd, row, column, rows, columns, dy_stride, x_stride,
           WEIGHT: tl.constexpr, PLUS_ONE: tl.constexpr, BIAS: tl.constexpr, TOGETHER: tl.constexpr):  # fmt: skip
    """(normed, weighted gradient, sums so far) of a tile; `TOGETHER` adds its rows up at once."""
    inside = (row < rows) & (column < columns)
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + row * dy_stride + column, mask=inside, other=0.0).to(tl.float32)
    normed = (x - mean) * rstd
    if BIAS:
        db += tl.sum(dy, axis=0, keep_dims=True) if TOGETHER else dy
    if WEIGHT:
        dw += tl.sum(dy * normed, axis=0, keep_dims=True) if TOGETHER else dy * normed
        weight = tl.load(weight_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
        dy = dy * (weight + 1.0) if PLUS_ONE else dy * weight
    return normed, dy, dw, db


@triton.jit
def _given(dx_ptr, dsummed_ptr, normed, dy, along, total, rstd, row, column, rows, columns, dsummed_stride,
           RMS: tl.constexpr, RESIDUAL: tl.constexpr):  # fmt: skip
    inside = (row < rows) & (column < columns)
    dx = dy - normed * along
    if not RMS:
        dx -= total
    dx *= rstd
    if RESIDUAL:
        dx += tl.load(dsummed_ptr + row * dsummed_stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(dx_ptr + row * columns + column, dx.to(dx_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _sums_out(ptr, sums, program, column, columns):
    total = tl.sum(sums, axis=0, keep_dims=True)
    tl.store(ptr + program.to(tl.int64) * columns + column, total, mask=column < columns)


@triton.jit
def backward_kernel(
    dy_ptr, dsummed_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, dw_ptr, db_ptr, rows, columns, dy_stride,
    dsummed_stride, x_stride, RMS: tl.constexpr, WEIGHT: tl.constexpr, PLUS_ONE: tl.constexpr, BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, HELD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    first = tl.arange(0, FIRST)[None, :]
    TOGETHER: tl.constexpr = HELD == 2
    KEPT: tl.constexpr = 1 if TOGETHER else HELD
    dw_a = tl.zeros([KEPT, FIRST], tl.float32)
    db_a = tl.zeros([KEPT, FIRST], tl.float32)
    if SECOND:
        second = FIRST + tl.arange(0, SECOND)[None, :]
        dw_b = tl.zeros([KEPT, SECOND], tl.float32)
        db_b = tl.zeros([KEPT, SECOND], tl.float32)
    for block in tl.range(program, tl.cdiv(rows, HELD), tl.num_programs(0), num_stages=STAGES):
        row = block * HELD + tl.arange(0, HELD).to(tl.int64)[:, None]
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
        mean = 0.0
        if not RMS:
            mean = tl.load(mean_ptr + row, mask=row < rows, other=0.0)
        a, dy_a, dw_a, db_a = _taken(dy_ptr, x_ptr, weight_ptr, dw_a, db_a, mean, rstd, row, first, rows, columns,
                                     dy_stride, x_stride, WEIGHT, PLUS_ONE, BIAS, TOGETHER)  # fmt: skip
        along = tl.sum(dy_a * a, axis=1, keep_dims=True)
        total = 0.0
        if not RMS:
            total = tl.sum(dy_a, axis=1, keep_dims=True)
        if SECOND:
            b, dy_b, dw_b, db_b = _taken(dy_ptr, x_ptr, weight_ptr, dw_b, db_b, mean, rstd, row, second, rows, columns,
                                         dy_stride, x_stride, WEIGHT, PLUS_ONE, BIAS, TOGETHER)  # fmt: skip
            along += tl.sum(dy_b * b, axis=1, keep_dims=True)
            if not RMS:
                total += tl.sum(dy_b, axis=1, keep_dims=True)
        along = along / columns
        total = total / columns
        _given(dx_ptr, dsummed_ptr, a, dy_a, along, total, rstd, row, first, rows, columns, dsummed_stride, RMS,
               RESIDUAL)  # fmt: skip
        if SECOND:
            _given(dx_ptr, dsummed_ptr, b, dy_b, along, total, rstd, row, second, rows, columns, dsummed_stride, RMS,
                   RESIDUAL)  # fmt: skip
    if WEIGHT:
        _sums_out(dw_ptr, dw_a, program, first, columns)
        if SECOND:
            _sums_out(dw_ptr, dw_b, program, second, columns)
    if BIAS:
        _sums_out(db_ptr, db_a, program, first, columns)
        if SECOND:
            _sums_out(db_ptr, db_b, program, second, columns)
