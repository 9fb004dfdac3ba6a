"""Norm kernels that hold whole rows, in PIECES tiles of WIDTH columns (12,288 are three of 4,096, not one of 16,384).

Lanes of all pieces are added up before threads synchronise, because synchronisation is what costs time: a forward pass
synchronises once (twice to centre a layer norm), a backward pass once. Programs stride over the rows, and the next rows
are loaded meanwhile. The backward pass sums the gradients of weight and bias for the rows of its program; column_sums
adds those up.
"""

# mypy: disable-error-code="assignment, var-annotated"
# (a tuple that grows by one tile per piece)

import triton
import triton.language as tl

from armillary.kernels.core.prefetch_triton import STREAM


@triton.jit
def _load(ptr, inside, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(ptr, mask=inside, other=0.0)
    return tl.load(ptr)


@triton.jit
def _store(ptr, value, inside, MASKED: tl.constexpr):
    value = value.to(ptr.dtype.element_ty)
    if MASKED:
        tl.store(ptr, value, mask=inside, cache_modifier=STREAM)
    else:
        tl.store(ptr, value, cache_modifier=STREAM)


@triton.jit
def _weighted(dy, weight, PLUS_ONE: tl.constexpr):
    return dy * (weight.to(tl.float32) + 1.0) if PLUS_ONE else dy * weight.to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def forward_kernel(
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
    PIECES: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    MASKED: tl.constexpr,
):
    offset = tl.arange(0, WIDTH)[None, :]
    for block in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = block * ROWS + tl.arange(0, ROWS).to(tl.int64)[:, None]
        there = row < rows
        loaded, residuals, xs = (), (), ()
        for i in tl.static_range(
            PIECES
        ):  # all pieces are loaded before anything is stored: a load does not pass a store
            column = i * WIDTH + offset
            inside = there & (column < columns)
            loaded += (_load(x_ptr + row * x_stride + column, inside, MASKED),)
            if RESIDUAL:
                residuals += (_load(residual_ptr + row * residual_stride + column, inside, MASKED),)
        total = tl.zeros([ROWS, WIDTH], tl.float32)  # of squares, or of the elements for the mean
        for i in tl.static_range(PIECES):
            x = loaded[i]
            if RESIDUAL:
                column = i * WIDTH + offset
                x = (x.to(tl.float32) + residuals[i].to(tl.float32)).to(x.dtype)  # rounded as it is stored
                _store(summed_ptr + row * columns + column, x, there & (column < columns), MASKED)
            x = x.to(tl.float32)
            total += x * x if RMS else x
            xs += (x,)
        mean = tl.zeros([ROWS, 1], tl.float32)
        if not RMS:
            mean = tl.sum(total, axis=1, keep_dims=True) / columns
            tl.store(mean_ptr + row, mean, mask=there)
            total = tl.zeros([ROWS, WIDTH], tl.float32)
            for i in tl.static_range(PIECES):
                off = xs[i] - mean
                if MASKED:
                    off = tl.where(i * WIDTH + offset < columns, off, 0.0)
                total += off * off
        rstd = tl.rsqrt(tl.sum(total, axis=1, keep_dims=True) / columns + eps)
        tl.store(rstd_ptr + row, rstd, mask=there)
        for i in tl.static_range(PIECES):
            column = i * WIDTH + offset
            y = (xs[i] if RMS else xs[i] - mean) * rstd
            if WEIGHT:
                y = _weighted(y, _load(weight_ptr + column, column < columns, MASKED), PLUS_ONE)
            if BIAS:
                y += _load(bias_ptr + column, column < columns, MASKED).to(tl.float32)
            _store(y_ptr + row * columns + column, y, there & (column < columns), MASKED)


@triton.jit(do_not_specialize=["rows"])
def backward_kernel(
    dy_ptr,
    dsummed_ptr,
    x_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    dx_ptr,
    parts_ptr,
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
    PIECES: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    MASKED: tl.constexpr,
    AHEAD: tl.constexpr,
    EARLY: tl.constexpr,
):
    """`parts` gets the program's sums, those for the weight before those for the bias. AHEAD: the weight is read once.
    EARLY: the kernel that adds up the parts is launched meanwhile."""
    offset = tl.arange(0, WIDTH)[None, :]
    dws, dbs, weights = (), (), ()
    for i in tl.static_range(PIECES):
        dws += (tl.zeros([ROWS, WIDTH], tl.float32),)
        dbs += (tl.zeros([ROWS, WIDTH], tl.float32),)
        if WEIGHT and AHEAD:
            column = i * WIDTH + offset
            weights += (_load(weight_ptr + column, column < columns, MASKED),)
    for block in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = block * ROWS + tl.arange(0, ROWS).to(tl.int64)[:, None]
        there = row < rows
        # each thread reads a one-element tile once per column it has, unless it is in shared memory
        alone: tl.constexpr = ROWS == 1 and STAGES == 1
        rstd = tl.load(rstd_ptr + block) if alone else tl.load(rstd_ptr + row, mask=there, other=0.0)
        mean = 0.0 * rstd
        if not RMS:
            mean = tl.load(mean_ptr + block) if alone else tl.load(mean_ptr + row, mask=there, other=0.0)
        along = tl.zeros([ROWS, WIDTH], tl.float32)
        total = tl.zeros([ROWS, WIDTH], tl.float32)
        xs, dys, new_dws, new_dbs = (), (), (), ()
        for i in tl.static_range(PIECES):
            column = i * WIDTH + offset
            inside = there & (column < columns)
            x = _load(x_ptr + row * x_stride + column, inside, MASKED).to(tl.float32)
            dy = _load(dy_ptr + row * dy_stride + column, inside, MASKED).to(tl.float32)
            x = x * rstd if RMS else (x - mean) * rstd
            if BIAS:
                new_dbs += (dbs[i] + dy,)
            if WEIGHT:
                new_dws += (dws[i] + dy * x,)
                weight = weights[i] if AHEAD else _load(weight_ptr + column, column < columns, MASKED)
                dy = _weighted(dy, weight, PLUS_ONE)
            along += dy * x
            total += dy
            xs += (x,)
            dys += (dy,)
        if WEIGHT:
            dws = new_dws
        if BIAS:
            dbs = new_dbs
        if RMS:
            mean_along = tl.sum(along, axis=1, keep_dims=True) / columns
            mean_total = mean_along
        else:
            both = tl.sum(tl.join(along, total), axis=1) / columns
            mean_along, mean_total = tl.split(both)
            mean_along, mean_total = mean_along[:, None], mean_total[:, None]
        for i in tl.static_range(PIECES):
            column = i * WIDTH + offset
            inside = there & (column < columns)
            dx = dys[i] - xs[i] * mean_along
            if not RMS:
                dx -= mean_total
            dx *= rstd
            if RESIDUAL:
                dx += _load(dsummed_ptr + row * dsummed_stride + column, inside, MASKED).to(tl.float32)
            _store(dx_ptr + row * columns + column, dx, inside, MASKED)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0).to(tl.int64)
    for i in tl.static_range(PIECES):
        column = i * WIDTH + offset
        if WEIGHT:
            total = tl.sum(dws[i], axis=0, keep_dims=True)
            tl.store(parts_ptr + program * columns + column, total, mask=column < columns)
        if BIAS:
            total = tl.sum(dbs[i], axis=0, keep_dims=True)
            at = program + (tl.num_programs(0) if WEIGHT else 0)
            tl.store(parts_ptr + at * columns + column, total, mask=column < columns)
