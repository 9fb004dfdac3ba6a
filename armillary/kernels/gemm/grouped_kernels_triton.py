"""Kernels of grouped GEMMs: tiles of rows that never cross an expert, loaded by TMA or by plain pointers.

Programs compute on the device which rows they have, so a launch depends on shapes only. By TMA a tile may read rows of
the next expert, which it does not store, and sums over rows (weight gradients) mask them in their last step; by
pointers they are masked when they are loaded.
"""

import triton
import triton.language as tl

# P rows (copies of tokens), E experts, K inputs, N outputs, R the summed dim


@triton.jit
def _matrix_tile(ptr, row, column, row_end, column_end, stride, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """[HEIGHT, WIDTH] at (row, column) of a matrix with `stride` elements per row; zeros past either end."""
    at_row, at_column = row + tl.arange(0, HEIGHT), column + tl.arange(0, WIDTH)
    inside = (at_row[:, None] < row_end) & (at_column[None, :] < column_end)
    return tl.load(ptr + at_row.to(tl.int64)[:, None] * stride + at_column[None, :], mask=inside, other=0.0)


@triton.jit
def grouped_gemm_kernel(
    a_src,
    weight_src,
    out_ptr,
    ends_ptr,
    down,
    P,
    columns,
    R,
    E: tl.constexpr,
    SLOTS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    EXACT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    GROUP: tl.constexpr,
    TMA: tl.constexpr,
):
    """One tile of one expert's rows. Rows after the last expert's are one more group, which is written as zeros."""
    across = tl.cdiv(columns, COLUMNS)
    first = tl.program_id(0) // (GROUP * across) * GROUP
    height = tl.minimum(down - first, GROUP)
    within = tl.program_id(0) % (GROUP * across)
    tile, column = first + within % height, within // height * COLUMNS
    slot = tl.arange(0, SLOTS)
    ends = tl.load(ends_ptr + slot, mask=slot < E, other=0)
    ends = tl.where(slot < E, ends, P)
    starts = tl.load(ends_ptr + slot - 1, mask=(slot > 0) & (slot <= E), other=0)
    starts = tl.where(slot <= E, starts, P)
    lasts = tl.cumsum((ends - starts + ROWS - 1) // ROWS, 0)  # tiles up to and including each group
    expert = tl.sum((lasts <= tile).to(tl.int32), 0)
    if expert <= E:
        is_expert = slot == expert
        start, end = tl.sum(tl.where(is_expert, starts, 0), 0), tl.sum(tl.where(is_expert, ends, 0), 0)
        before = tl.sum(tl.where(slot == expert - 1, lasts, 0), 0)
        row = start + (tile - before) * ROWS
        acc = tl.zeros((ROWS, COLUMNS), tl.float32)
        steps = tl.where(expert < E, tl.cdiv(R, STEP), 0)
        for step in tl.range(0, steps):
            if TMA:
                a = a_src.load([row, step * STEP])
                if TRANSPOSED:
                    b = tl.trans(weight_src.load([expert * columns + column, step * STEP]))
                else:  # columns of a past R are zeros, whatever the next expert's weight has there
                    b = weight_src.load([expert * R + step * STEP, column])
            else:
                a = _matrix_tile(a_src, row, step * STEP, end, R, R, ROWS, STEP)
                weight = weight_src + expert.to(tl.int64) * columns * R
                if TRANSPOSED:
                    b = tl.trans(_matrix_tile(weight, column, step * STEP, columns, R, R, COLUMNS, STEP))
                else:
                    b = _matrix_tile(weight, step * STEP, column, R, columns, columns, STEP, COLUMNS)
            acc = tl.dot(a, b, acc, input_precision=EXACT)
        m, n = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
        at = m.to(tl.int64)[:, None] * columns + n[None, :]
        tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=(m[:, None] < end) & (n[None, :] < columns))


@triton.jit
def row_sums_kernel(
    dy_src,
    x_src,
    out_ptr,
    ends_ptr,
    N,
    K,
    EXACT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    GROUP: tl.constexpr,
    TMA: tl.constexpr,
):
    """One tile of one expert's weight gradient: a sum over its rows."""
    down, across = tl.cdiv(N, ROWS), tl.cdiv(K, COLUMNS)
    expert = tl.program_id(0) // (down * across)
    pid = tl.program_id(0) % (down * across)
    first = pid // (GROUP * across) * GROUP
    height = tl.minimum(down - first, GROUP)
    within = pid % (GROUP * across)
    n0, k0 = (first + within % height) * ROWS, within // height * COLUMNS
    end = tl.load(ends_ptr + expert)
    start = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    if TMA:
        full_steps = (end - start) // STEP
        for step in tl.range(0, full_steps):
            dy = dy_src.load([start + step * STEP, n0])
            acc = tl.dot(tl.trans(dy), x_src.load([start + step * STEP, k0]), acc, input_precision=EXACT)
        row = start + full_steps * STEP
        if row < end:
            owned = row + tl.arange(0, STEP) < end
            dy, x = dy_src.load([row, n0]), x_src.load([row, k0])
            dy, x = tl.where(owned[:, None], dy, 0.0), tl.where(owned[:, None], x, 0.0)
            acc = tl.dot(tl.trans(dy), x.to(dy.dtype), acc, input_precision=EXACT)
    else:
        for row in tl.range(start, end, STEP):
            dy = _matrix_tile(dy_src, row, n0, end, N, N, STEP, ROWS)
            x = _matrix_tile(x_src, row, k0, end, K, K, STEP, COLUMNS)
            acc = tl.dot(tl.trans(dy), x, acc, input_precision=EXACT)
    n, k = n0 + tl.arange(0, ROWS), k0 + tl.arange(0, COLUMNS)
    at = expert.to(tl.int64) * N * K + n.to(tl.int64)[:, None] * K + k[None, :]
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=(n[:, None] < N) & (k[None, :] < K))
