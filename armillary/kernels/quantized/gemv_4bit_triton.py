"""A matrix-vector product over 4-bit codes in Triton: codes go straight into registers, a few rows per program.

A program's first codes and scales are loaded before it waits for the previous kernel, which never writes weights.
Two integer codes become fp32 numbers by one instruction and a shift: as the last bits of two bf16 numbers, 128 + code
each. The upper one is used as it lies, with the lower as the end of its mantissa, which adds 0.2617 and at most 2⁻¹² of
a code. What was added is subtracted once per group, times the sum of the inputs.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from armillary.kernels.core.row_loads_triton import load_rows
from armillary.kernels.quantized.packed_values_triton import (
    finish_rows,
    fp4_pair,
    high_bits,
    k_minimum,
    k_row,
    k_scale,
    load_groups,
    moved,
    pair_of,
    places,
    raised,
    scale_number,
    table_pair,
    words_of_row,
)

# N rows, W words of eight codes, G scales per row


_LOW = tl.constexpr(128.0)
_HIGH = tl.constexpr(128.0 + (0x4300 + 7.5) / 65536)
"""what is added to the codes of a pair, on average"""


@triton.jit
def _numbers(w, h, table_ptr, magic, upper, J: tl.constexpr, KIND: tl.constexpr):
    """The nibbles J and J + 4 as fp32: integers with what is added to them, fp4 divided by 2¹⁴. `upper` is 2¹⁶: units
    for multiplication are idle while those for shifts are not."""
    if KIND == "table":
        return table_pair(w, table_ptr, J)
    elif KIND != "mxfp4" and KIND != "nvfp4":
        both = (moved(w, -4 * J) & 0x000F000F) | magic
        if KIND == "q5_k" or KIND == "q6_k":
            both = both | raised(h, J, KIND)
        return (both * upper).to(tl.float32, bitcast=True), both.to(tl.float32, bitcast=True)
    else:
        return fp4_pair(w, J)


@triton.jit
def _pair(x_ptr, at, WORDS, J: tl.constexpr, KIND: tl.constexpr, IS_BF16: tl.constexpr, EVEN: tl.constexpr):
    """The inputs of nibbles J and J + 4 of words, fp32."""
    where = pair_of(at, J, KIND)
    both = tl.load(x_ptr + where) if EVEN else tl.load(x_ptr + where, mask=at < WORDS, other=0)
    if IS_BF16:
        first = (both << 16).to(tl.float32, bitcast=True)
        second = (both & -65536).to(tl.float32, bitcast=True)
    else:
        first = (both & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        second = (both >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return first, second


@triton.jit
def _chunks(p, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """Sums over four words, which are one thread's."""
    return tl.sum(tl.reshape(p, (ROWS, WORDS // 4, 4)), 2)


@triton.jit
def _step4(
    acc,
    squares,
    w,
    h,
    scale,
    zero,
    x_ptr,
    norm_ptr,
    scale_ptr,
    zero_ptr,
    row,
    begin,
    WORDS,
    G,
    magic,
    upper,
    HAS_NORM: tl.constexpr,
    IS_BF16: tl.constexpr,
    KIND: tl.constexpr,
    ZEROS: tl.constexpr,
    BY_ROW: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """(sums [ROWS, chunks of four words], squares of x) with one more step; `scale` and `zero` are those of the step
    where one is enough for a block of 128 columns."""
    at = begin + tl.arange(0, DEPTH // 8)
    many: tl.constexpr = (not BY_ROW) and GROUP < 128
    integer: tl.constexpr = KIND != "mxfp4" and KIND != "nvfp4" and KIND != "table"
    minima: tl.constexpr = KIND == "q4_k" or KIND == "q5_k"
    k_quant: tl.constexpr = minima or KIND == "q6_k"
    each: tl.constexpr = GROUP // 8 if k_quant else 1  # pairs of nibbles of four words with one scale
    middle: tl.constexpr = 8.0 if KIND == "int4" else 32.0
    chunk = begin + 4 * tl.arange(0, DEPTH // 32)
    sums_of_words = tl.zeros([ROWS, DEPTH // 8], tl.float32)
    inputs = tl.zeros([1, DEPTH // 8], tl.float32)  # what is subtracted
    plain = tl.zeros([1, DEPTH // 8], tl.float32)  # sums of x
    for j in tl.static_range(4):
        first, second = _pair(x_ptr, at, WORDS, j, KIND, IS_BF16, EVEN)
        if HAS_NORM:
            squares += first * first + second * second
            norm_first, norm_second = _pair(norm_ptr, at, WORDS, j, KIND, IS_BF16, EVEN)
            first, second = first * norm_first, second * norm_second
        low, high = _numbers(w, h, zero_ptr, magic, upper, j, KIND)
        sums_of_words += low * first[None, :]
        sums_of_words += high * second[None, :]
        if integer:
            if ZEROS or minima:
                inputs += (first * _LOW + second * _HIGH)[None, :]
                plain += (first + second)[None, :]
            else:
                inputs += (first * (_LOW + middle) + second * (_HIGH + middle))[None, :]
        if many and (j + 1) % each == 0:
            sums = _chunks(sums_of_words, ROWS, DEPTH // 8) - _chunks(inputs, 1, DEPTH // 8)
            if k_quant:
                columns = (8 * chunk + 8 * (j + 1 - each))[None, :]
                bytes_row = k_row(scale_ptr, row[:, None], 8 * WORDS, KIND)
                acc += sums * k_scale(bytes_row, columns, 8 * WORDS, KIND)
                if minima:
                    acc -= k_minimum(bytes_row, columns, 8 * WORDS) * _chunks(plain, 1, DEPTH // 8)
            else:
                column = 2 * pair_of(chunk, j, KIND)
                if ZEROS:
                    zeros = load_groups(zero_ptr, row, column, 8 * WORDS, G, GROUP, EVEN)
                    sums -= zeros.to(tl.float32) * _chunks(plain, 1, DEPTH // 8)
                scales = load_groups(scale_ptr, row, column, 8 * WORDS, G, GROUP, EVEN)
                acc += sums * scale_number(scales, KIND)
            sums_of_words = tl.zeros([ROWS, DEPTH // 8], tl.float32)
            inputs = tl.zeros([1, DEPTH // 8], tl.float32)
            plain = tl.zeros([1, DEPTH // 8], tl.float32)
    if not many:
        sums = _chunks(sums_of_words, ROWS, DEPTH // 8) - _chunks(inputs, 1, DEPTH // 8)
        if ZEROS:
            sums -= zero.to(tl.float32) * _chunks(plain, 1, DEPTH // 8)
        acc += sums if BY_ROW else sums * scale_number(scale, KIND)
    return acc, squares


@triton.jit
def gemv4_kernel(
    x_ptr,
    w_ptr,
    scale_ptr,
    zero_ptr,
    norm_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    N,
    WORDS,
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
    """ROWS of 4-bit codes times x, which may be normed and comes, as the norm does, in pairs of 32 bits; GATED: rows
    alternate between gate and up. Codes are loaded one step ahead."""
    if EARLY:
        gdc_launch_dependents()
    bf16: tl.constexpr = out_ptr.dtype.element_ty == tl.bfloat16
    many: tl.constexpr = (not BY_ROW) and GROUP < 128
    row = tl.minimum(tl.program_id(0) * ROWS + tl.arange(0, ROWS), N - 1).to(
        tl.int64
    )  # rows past the last are never stored
    w_row = w_ptr + row[:, None] * words_of_row(WORDS, KIND)
    at, chunk = tl.arange(0, DEPTH // 8), 4 * tl.arange(0, DEPTH // 32)
    w = load_rows(w_row, at, WORDS, EVEN)
    h = high_bits(w_row, at[None, :], WORDS, KIND)
    scale, zero = 0.0, 0.0
    if not many:
        if not BY_ROW:
            scale = load_groups(scale_ptr, row, 8 * chunk, 8 * WORDS, G, GROUP, EVEN)
        if ZEROS:
            zero = load_groups(zero_ptr, row, 8 * chunk, 8 * WORDS, G, 1 << 30 if BY_ROW else GROUP, EVEN)
    if EARLY:
        gdc_wait()
    residual = 0.0
    if HAS_RESIDUAL:
        place, width = places(N, GATED, ROWS)
        residual = tl.load(residual_ptr + place, mask=place < width, other=0.0).to(tl.float32)
    acc, squares = tl.zeros([ROWS, DEPTH // 32], tl.float32), tl.zeros([DEPTH // 8], tl.float32)
    begin = 0
    if not ONCE:
        for following in range(DEPTH // 8, WORDS, DEPTH // 8):
            next_w = load_rows(w_row, following + at, WORDS, EVEN)
            next_h = high_bits(w_row, (following + at)[None, :], WORDS, KIND)
            next_scale, next_zero = scale, zero
            if not many:
                columns = 8 * (following + chunk)
                if not BY_ROW:
                    next_scale = load_groups(scale_ptr, row, columns, 8 * WORDS, G, GROUP, EVEN)
                    if ZEROS:
                        next_zero = load_groups(zero_ptr, row, columns, 8 * WORDS, G, GROUP, EVEN)
            acc, squares = _step4(
                acc,
                squares,
                w,
                h,
                scale,
                zero,
                x_ptr,
                norm_ptr,
                scale_ptr,
                zero_ptr,
                row,
                begin,
                WORDS,
                G,
                magic,
                upper,
                HAS_NORM,
                bf16,
                KIND,
                ZEROS,
                BY_ROW,
                GROUP,
                EVEN,
                ROWS,
                DEPTH,
            )
            w, h, scale, zero, begin = next_w, next_h, next_scale, next_zero, following
    acc, squares = _step4(
        acc,
        squares,
        w,
        h,
        scale,
        zero,
        x_ptr,
        norm_ptr,
        scale_ptr,
        zero_ptr,
        row,
        begin,
        WORDS,
        G,
        magic,
        upper,
        HAS_NORM,
        bf16,
        KIND,
        ZEROS,
        BY_ROW,
        GROUP,
        EVEN,
        ROWS,
        DEPTH,
    )
    finish_rows(
        tl.sum(acc, 1) * (16384.0 if KIND == "mxfp4" or KIND == "nvfp4" else 1.0),
        tl.sum(squares),
        residual,
        scale_ptr,
        zero_ptr,
        bias_ptr,
        out_ptr,
        row,
        N,
        8 * WORDS,
        eps,
        KIND,
        BY_ROW,
        HAS_NORM,
        HAS_BIAS,
        GATED,
        ROWS,
    )
