"""A matrix-vector product over bytes or fp8 numbers in Triton: codes go straight into registers, a few rows per
program. Its first codes and scales are loaded before it waits for the previous kernel, which never writes weights."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from armillary.kernels.core.row_loads_triton import load_rows, load_vector
from armillary.kernels.quantized.packed_values_triton import finish_rows, load_groups, places, scale_number

# N rows, K columns, G scales per row


@triton.jit
def _step8(
    acc,
    squares,
    w,
    scale,
    zero,
    x_ptr,
    norm_ptr,
    begin,
    K,
    HAS_NORM: tl.constexpr,
    KIND: tl.constexpr,
    ZEROS: tl.constexpr,
    BY_ROW: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """(sums [ROWS, chunks of 16 columns], squares of x) with one more step."""
    at = begin + tl.arange(0, DEPTH)
    x = load_vector(x_ptr, at, K, EVEN).to(tl.float32)[None, :]
    if HAS_NORM:
        squares += x * x
        x = x * load_vector(norm_ptr, at, K, EVEN).to(tl.float32)[None, :]
    numbers = (w.to(tl.float8e4nv, bitcast=True) if KIND == "fp8" else w).to(tl.float32)
    sums = tl.sum(tl.reshape(numbers * x, (ROWS, DEPTH // 16, 16)), 2)
    if KIND == "int8":
        middle = zero.to(tl.float32) if ZEROS else 128.0
        sums -= middle * tl.sum(tl.reshape(x, (1, DEPTH // 16, 16)), 2)
    return acc + (sums if BY_ROW else sums * scale_number(scale, KIND)), squares


@triton.jit
def gemv8_kernel(
    x_ptr,
    w_ptr,
    scale_ptr,
    zero_ptr,
    norm_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    N,
    K,
    G,
    magic,
    upper,
    eps,
    EARLY: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    KIND: tl.constexpr,
    ZEROS: tl.constexpr,
    BY_ROW: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,
    ONCE: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """ROWS of bytes or fp8 numbers times x, which may be normed; GATED: rows alternate between gate and up."""
    if EARLY:
        gdc_launch_dependents()
    row = tl.minimum(tl.program_id(0) * ROWS + tl.arange(0, ROWS), N - 1).to(
        tl.int64
    )  # rows past the last are never stored
    w_row = w_ptr + row[:, None] * K
    at, chunk = tl.arange(0, DEPTH), 16 * tl.arange(0, DEPTH // 16)
    w = load_rows(w_row, at, K, EVEN)
    scale, zero = 0.0, 0.0
    if not BY_ROW:
        scale = load_groups(scale_ptr, row, chunk, K, G, GROUP, EVEN)
    if ZEROS:
        zero = load_groups(zero_ptr, row, chunk, K, G, 1 << 30 if BY_ROW else GROUP, EVEN)
    if EARLY:
        gdc_wait()
    residual = 0.0
    if HAS_RESIDUAL:
        place, width = places(N, GATED, ROWS)
        residual = tl.load(residual_ptr + place, mask=place < width, other=0.0).to(tl.float32)
    acc, squares = tl.zeros([ROWS, DEPTH // 16], tl.float32), tl.zeros([1, DEPTH], tl.float32)
    begin = 0
    if not ONCE:
        for following in range(DEPTH, K, DEPTH):
            next_w = load_rows(w_row, following + at, K, EVEN)
            next_scale, next_zero = scale, zero
            if not BY_ROW:
                next_scale = load_groups(scale_ptr, row, following + chunk, K, G, GROUP, EVEN)
                if ZEROS:
                    next_zero = load_groups(zero_ptr, row, following + chunk, K, G, GROUP, EVEN)
            acc, squares = _step8(
                acc,
                squares,
                w,
                scale,
                zero,
                x_ptr,
                norm_ptr,
                begin,
                K,
                HAS_NORM,
                KIND,
                ZEROS,
                BY_ROW,
                EVEN,
                ROWS,
                DEPTH,
            )
            w, scale, zero, begin = next_w, next_scale, next_zero, following
    acc, squares = _step8(
        acc,
        squares,
        w,
        scale,
        zero,
        x_ptr,
        norm_ptr,
        begin,
        K,
        HAS_NORM,
        KIND,
        ZEROS,
        BY_ROW,
        EVEN,
        ROWS,
        DEPTH,
    )
    finish_rows(
        tl.sum(acc, 1),
        tl.sum(squares),
        residual,
        scale_ptr,
        zero_ptr,
        bias_ptr,
        out_ptr,
        row,
        N,
        K,
        eps,
        KIND,
        BY_ROW,
        HAS_NORM,
        HAS_BIAS,
        GATED,
        ROWS,
    )
