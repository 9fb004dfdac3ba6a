"""Norm kernels for rows too wide for the registers of a program: rows are read in pieces, from the cache where it holds
them.
"""

import triton
import triton.language as tl


@triton.jit
def _wide_load(x_ptr, residual_ptr, x_at, residual_at, inside, RESIDUAL: tl.constexpr, EVICTION: tl.constexpr):
    """A piece of a row, with the residual added and rounded as it is stored. EVICTION: the cache's policy."""
    x = tl.load(x_ptr + x_at, mask=inside, other=0.0, eviction_policy=EVICTION)
    if RESIDUAL:
        x = (x.to(tl.float32) + tl.load(residual_ptr + residual_at, mask=inside, other=0.0).to(tl.float32)).to(x.dtype)
    return x


@triton.jit
def forward_wide_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    summed_ptr,
    mean_ptr,
    rstd_ptr,
    rows,
    columns,
    x_stride,
    residual_stride,
    eps,
    RMS: tl.constexpr,
    WEIGHT: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    residual_ptr += row * residual_stride
    sums = tl.zeros([BLOCK], tl.float32)  # of squares: of the elements, or of their distances from the mean
    mean = 0.0
    if RMS:
        for start in range(0, columns, BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = _wide_load(x_ptr, residual_ptr, at, at, at < columns, RESIDUAL, "evict_last").to(tl.float32)
            sums += x * x
    else:  # Welford's rule per lane, then Chan's over the lanes: nothing large is subtracted
        means = tl.zeros([BLOCK], tl.float32)
        for start in range(0, columns, BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = _wide_load(x_ptr, residual_ptr, at, at, at < columns, RESIDUAL, "evict_last").to(tl.float32)
            off = tl.where(at < columns, x - means, 0.0)
            newer = means + off * (1.0 / (start // BLOCK + 1))
            sums += off * (x - newer)
            means = newer
        counts = (columns - tl.arange(0, BLOCK) + BLOCK - 1) // BLOCK
        mean = tl.sum(means * counts) / columns
        sums += counts * (means - mean) * (means - mean)
        tl.store(mean_ptr + row, mean)
    rstd = tl.rsqrt(tl.sum(sums) / columns + eps)
    tl.store(rstd_ptr + row, rstd)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < columns
        x = _wide_load(x_ptr, residual_ptr, at, at, inside, RESIDUAL, "evict_first")
        if RESIDUAL:
            tl.store(summed_ptr + row * columns + at, x, mask=inside)
        y = (x.to(tl.float32) - mean) * rstd
        if WEIGHT:
            weight = tl.load(weight_ptr + at, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
            y *= weight + 1.0 if PLUS_ONE else weight
        if BIAS:
            y += tl.load(bias_ptr + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(y_ptr + row * columns + at, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _wide_gradient(x_row, dy_row, weight_ptr, at, inside, mean, rstd, WEIGHT: tl.constexpr, PLUS_ONE: tl.constexpr):
    """A piece of a row: the normalised x, and the gradient of it."""
    normed = (tl.load(x_row + at, mask=inside, other=0.0).to(tl.float32) - mean) * rstd
    dy = tl.load(dy_row + at, mask=inside, other=0.0).to(tl.float32)
    if WEIGHT:
        weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
        dy *= weight + 1.0 if PLUS_ONE else weight
    return normed, dy


@triton.jit
def backward_wide_kernel(
    dy_ptr,
    dsummed_ptr,
    x_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    dx_ptr,
    dw_ptr,
    db_ptr,
    rows,
    columns,
    dy_stride,
    dsummed_stride,
    x_stride,
    RMS: tl.constexpr,
    WEIGHT: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A row's gradient in two passes over its pieces; the weights' gradients come from weights_wide_kernel."""
    row = tl.program_id(0).to(tl.int64)
    x_row, dy_row = x_ptr + row * x_stride, dy_ptr + row * dy_stride
    rstd = tl.load(rstd_ptr + row)
    mean = 0.0
    if not RMS:
        mean = tl.load(mean_ptr + row)
    along = tl.zeros([BLOCK], tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < columns
        normed, dy = _wide_gradient(x_row, dy_row, weight_ptr, at, inside, mean, rstd, WEIGHT, PLUS_ONE)
        along += dy * normed
        total += dy
    mean_along = tl.sum(along) / columns
    mean_total = 0.0
    if not RMS:
        mean_total = tl.sum(total) / columns
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < columns
        normed, dy = _wide_gradient(x_row, dy_row, weight_ptr, at, inside, mean, rstd, WEIGHT, PLUS_ONE)
        dx = (dy - normed * mean_along - mean_total) * rstd
        if RESIDUAL:
            dx += tl.load(dsummed_ptr + row * dsummed_stride + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx_ptr + row * columns + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)


@triton.jit
def weights_wide_kernel(
    dy_ptr,
    x_ptr,
    mean_ptr,
    rstd_ptr,
    dw_ptr,
    db_ptr,
    rows,
    columns,
    dy_stride,
    x_stride,
    RMS: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
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
