"""Matrix-vector sums_of_words over packed weights in Triton: codes go straight into registers, a few rows per program.

A program's first codes and scales are loaded before it waits for the previous kernel, which never writes weights.
4-bit codes become fp32 numbers without a conversion: a nibble is put into the mantissa of 1.0, which gives 1 + code /
128 or 1 + code / 2048 by its place; the inputs are multiplied by 128 or 2048, and their sums subtracted once per 32.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from armillary.kernels.core.launch import can_start_early, ceil_div, early_launch, on

# N rows, K columns, W words of eight 4-bit codes, G scales per row


_ONE = 0x3F800000
"""1.0 in fp32; handed to kernels in a register, so that mask and magic number are one instruction"""


class PackedGemvTiles(NamedTuple):
    """Tile sizes for one token."""

    rows: int  # of the weight per program
    depth: int  # columns per step
    warps: int
    early: bool = True  # start before the previous kernel has ended, where the GPU can


def run_gemv(
    x: Tensor, codes: Tensor, scale: Tensor, zero: Tensor | None, kind: str, group: int, tiles: PackedGemvTiles
) -> Tensor:
    """One token x [K] through codes [N, …]; the result is [N] in x's dtype."""
    N, K, four_bits = len(codes), x.numel(), kind not in ("int8", "fp8")
    out = x.new_empty(N)
    early = can_start_early(x.device) and tiles.early
    kernel = gemv4_kernel if four_bits else gemv8_kernel
    with on(x):
        kernel[(ceil_div(N, tiles.rows),)](
            x.view(torch.int32) if four_bits else x,  # 4-bit codes meet pairs of inputs
            codes,
            scale,
            zero,
            out,
            N,
            K // 8 if four_bits else K,
            scale.shape[1],
            _ONE,
            EARLY=early,
            KIND=kind,
            ZEROS=zero is not None and kind != "nvfp4",
            BY_ROW=scale.shape[1] == 1,
            GROUP=group,
            EVEN=K % tiles.depth == 0,
            ONCE=tiles.depth >= K,
            ROWS=tiles.rows,
            DEPTH=tiles.depth,
            num_warps=tiles.warps,
            **early_launch(early),
        )
    return out


@triton.jit
def scale_number(scale, KIND: tl.constexpr):
    """Scales as fp32; those of mxfp4 are exponents with bias 127."""
    if KIND == "mxfp4":
        exponent = scale.to(tl.int32)
        # the smallest is subnormal
        return tl.where(exponent == 0, 0x400000, exponent << 23).to(tl.float32, bitcast=True)
    elif KIND == "nvfp4":
        return scale.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        return scale.to(tl.float32)


@triton.jit
def _codes(w_row, at, WIDTH, EVEN: tl.constexpr):
    """One step of all rows of a program, read once."""
    if EVEN:
        return tl.load(w_row + at[None, :], eviction_policy="evict_first")
    else:
        return tl.load(w_row + at[None, :], mask=at[None, :] < WIDTH, other=0, eviction_policy="evict_first")


@triton.jit
def _of_groups(pointer, row, column, columns, G, GROUP: tl.constexpr, EVEN: tl.constexpr):
    """Scales or zeros of rows at these columns."""
    at = row[:, None] * G + (column // GROUP)[None, :]
    if EVEN:
        return tl.load(pointer + at)
    else:
        return tl.load(pointer + at, mask=column[None, :] < columns, other=0)


@triton.jit
def moved(w, LEFT: tl.constexpr):
    """Words shifted left, or right where LEFT is negative."""
    if LEFT > 0:
        return w << LEFT
    elif LEFT < 0:
        return w >> -LEFT
    else:
        return w


@triton.jit
def fp4_number(w, PLACE: tl.constexpr):
    """The E2M1 code at the nibble PLACE as fp32: its bits moved to where fp32 has them, which divides by 2^126."""
    bits = moved(w, 22 - 4 * PLACE)
    number = ((bits & 0x1C00000) | ((bits & 0x2000000) << 6)).to(tl.float32, bitcast=True)
    return number * 8.507059173023462e37


@triton.jit
def _nibble(w, magic, PLACE: tl.constexpr, J: tl.constexpr, KIND: tl.constexpr):
    """The nibble at PLACE as fp32: 1 + code / 128 for an even J, 1 + code / 2048 for an odd one; fp4 as it is."""
    if KIND == "int4":
        if J % 2 == 0:
            return ((moved(w, 16 - 4 * PLACE) & 0xF0000) | magic).to(tl.float32, bitcast=True)
        else:
            return ((moved(w, 12 - 4 * PLACE) & 0xF000) | magic).to(tl.float32, bitcast=True)
    else:
        return fp4_number(w, PLACE)


@triton.jit
def _pair(x_ptr, at, WORDS, J: tl.constexpr, IS_BF16: tl.constexpr, EVEN: tl.constexpr):
    """The inputs of nibbles J and J + 4 of words, fp32."""
    where = at // 16 * 64 + 16 * J + at % 16
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
    w,
    scale,
    zero,
    x_ptr,
    scale_ptr,
    zero_ptr,
    row,
    begin,
    WORDS,
    G,
    magic,
    IS_BF16: tl.constexpr,
    KIND: tl.constexpr,
    ZEROS: tl.constexpr,
    BY_ROW: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Sums [ROWS, chunks of four words] with one more step; `scale` and `zero` are those of the step where one is
    enough for a block of 128 columns."""
    at = begin + tl.arange(0, DEPTH // 8)
    many: tl.constexpr = (not BY_ROW) and GROUP < 128
    chunk = begin + 4 * tl.arange(0, DEPTH // 32)
    sums_of_words = tl.zeros([ROWS, DEPTH // 8], tl.float32)
    inputs = tl.zeros([1, DEPTH // 8], tl.float32)  # what is subtracted
    plain = tl.zeros([1, DEPTH // 8], tl.float32)  # sums of x
    for j in tl.static_range(4):
        first, second = _pair(x_ptr, at, WORDS, j, IS_BF16, EVEN)
        factor = (128.0 if j % 2 == 0 else 2048.0) if KIND == "int4" else 1.0
        sums_of_words += _nibble(w, magic, j, j, KIND) * (first * factor)[None, :]
        sums_of_words += _nibble(w, magic, j + 4, j, KIND) * (second * factor)[None, :]
        if KIND == "int4":
            total = (first + second)[None, :]
            inputs += total * (factor if ZEROS else factor + 8.0)
            plain += total
        if many:
            sums = _chunks(sums_of_words - inputs, ROWS, DEPTH // 8)
            column = chunk // 16 * 128 + 32 * j + chunk % 16 * 2
            if ZEROS:
                zeros = _of_groups(zero_ptr, row, column, 8 * WORDS, G, GROUP, EVEN)
                sums -= zeros.to(tl.float32) * _chunks(plain, 1, DEPTH // 8)
            scales = _of_groups(scale_ptr, row, column, 8 * WORDS, G, GROUP, EVEN)
            acc += sums * scale_number(scales, KIND)
            sums_of_words = tl.zeros([ROWS, DEPTH // 8], tl.float32)
            inputs = tl.zeros([1, DEPTH // 8], tl.float32)
            plain = tl.zeros([1, DEPTH // 8], tl.float32)
    if not many:
        sums = _chunks(sums_of_words - inputs, ROWS, DEPTH // 8)
        if ZEROS:
            sums -= zero.to(tl.float32) * _chunks(plain, 1, DEPTH // 8)
        acc += sums if BY_ROW else sums * scale_number(scale, KIND)
    return acc


@triton.jit
def gemv4_kernel(
    x_ptr,
    w_ptr,
    scale_ptr,
    zero_ptr,
    out_ptr,
    N,
    WORDS,
    G,
    magic,
    EARLY: tl.constexpr,
    KIND: tl.constexpr,
    ZEROS: tl.constexpr,
    BY_ROW: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,
    ONCE: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """ROWS of 4-bit codes times x, which comes as pairs in 32 bits. Codes are loaded one step ahead."""
    if EARLY:
        gdc_launch_dependents()
    bf16: tl.constexpr = out_ptr.dtype.element_ty == tl.bfloat16
    many: tl.constexpr = (not BY_ROW) and GROUP < 128
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = tl.minimum(n, N - 1).to(tl.int64)  # rows past the last are never stored
    w_row = w_ptr + row[:, None] * WORDS
    at, chunk = tl.arange(0, DEPTH // 8), 4 * tl.arange(0, DEPTH // 32)
    w = _codes(w_row, at, WORDS, EVEN)
    scale, zero = 0.0, 0.0
    if not many:
        if not BY_ROW:
            scale = _of_groups(scale_ptr, row, 8 * chunk, 8 * WORDS, G, GROUP, EVEN)
        if ZEROS:
            zero = _of_groups(zero_ptr, row, 8 * chunk, 8 * WORDS, G, 1 << 30 if BY_ROW else GROUP, EVEN)
    if EARLY:
        gdc_wait()
    acc = tl.zeros([ROWS, DEPTH // 32], tl.float32)
    begin = 0
    if not ONCE:
        for following in range(DEPTH // 8, WORDS, DEPTH // 8):
            next_w = _codes(w_row, following + at, WORDS, EVEN)
            next_scale, next_zero = scale, zero
            if not many:
                columns = 8 * (following + chunk)
                if not BY_ROW:
                    next_scale = _of_groups(scale_ptr, row, columns, 8 * WORDS, G, GROUP, EVEN)
                    if ZEROS:
                        next_zero = _of_groups(zero_ptr, row, columns, 8 * WORDS, G, GROUP, EVEN)
            acc = _step4(
                acc,
                w,
                scale,
                zero,
                x_ptr,
                scale_ptr,
                zero_ptr,
                row,
                begin,
                WORDS,
                G,
                magic,
                bf16,
                KIND,
                ZEROS,
                BY_ROW,
                GROUP,
                EVEN,
                ROWS,
                DEPTH,
            )
            w, scale, zero, begin = next_w, next_scale, next_zero, following
    acc = _step4(
        acc,
        w,
        scale,
        zero,
        x_ptr,
        scale_ptr,
        zero_ptr,
        row,
        begin,
        WORDS,
        G,
        magic,
        bf16,
        KIND,
        ZEROS,
        BY_ROW,
        GROUP,
        EVEN,
        ROWS,
        DEPTH,
    )
    _store(tl.sum(acc, 1), scale_ptr, zero_ptr, out_ptr, n, row, N, KIND, BY_ROW)


@triton.jit
def _store(total, scale_ptr, zero_ptr, out_ptr, n, row, N, KIND: tl.constexpr, BY_ROW: tl.constexpr):
    if BY_ROW:
        total *= scale_number(tl.load(scale_ptr + row), KIND)
    if KIND == "nvfp4":
        total /= tl.load(zero_ptr + row)
    tl.store(out_ptr + n, total.to(out_ptr.dtype.element_ty), mask=n < N)


@triton.jit
def _inputs8(x_ptr, at, K, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(x_ptr + at).to(tl.float32)
    else:
        return tl.load(x_ptr + at, mask=at < K, other=0.0).to(tl.float32)


@triton.jit
def _step8(
    acc,
    w,
    scale,
    zero,
    x_ptr,
    begin,
    K,
    KIND: tl.constexpr,
    ZEROS: tl.constexpr,
    BY_ROW: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Sums [ROWS, chunks of 16 columns] with one more step."""
    x = _inputs8(x_ptr, begin + tl.arange(0, DEPTH), K, EVEN)[None, :]
    numbers = (w.to(tl.float8e4nv, bitcast=True) if KIND == "fp8" else w).to(tl.float32)
    sums = tl.sum(tl.reshape(numbers * x, (ROWS, DEPTH // 16, 16)), 2)
    if KIND == "int8":
        middle = zero.to(tl.float32) if ZEROS else 128.0
        sums -= middle * tl.sum(tl.reshape(x, (1, DEPTH // 16, 16)), 2)
    return acc + (sums if BY_ROW else sums * scale_number(scale, KIND))


@triton.jit
def gemv8_kernel(
    x_ptr,
    w_ptr,
    scale_ptr,
    zero_ptr,
    out_ptr,
    N,
    K,
    G,
    magic,
    EARLY: tl.constexpr,
    KIND: tl.constexpr,
    ZEROS: tl.constexpr,
    BY_ROW: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,
    ONCE: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """ROWS of bytes or fp8 numbers times x."""
    if EARLY:
        gdc_launch_dependents()
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = tl.minimum(n, N - 1).to(tl.int64)  # rows past the last are never stored
    w_row = w_ptr + row[:, None] * K
    at, chunk = tl.arange(0, DEPTH), 16 * tl.arange(0, DEPTH // 16)
    w = _codes(w_row, at, K, EVEN)
    scale, zero = 0.0, 0.0
    if not BY_ROW:
        scale = _of_groups(scale_ptr, row, chunk, K, G, GROUP, EVEN)
    if ZEROS:
        zero = _of_groups(zero_ptr, row, chunk, K, G, 1 << 30 if BY_ROW else GROUP, EVEN)
    if EARLY:
        gdc_wait()
    acc = tl.zeros([ROWS, DEPTH // 16], tl.float32)
    begin = 0
    if not ONCE:
        for following in range(DEPTH, K, DEPTH):
            next_w = _codes(w_row, following + at, K, EVEN)
            next_scale, next_zero = scale, zero
            if not BY_ROW:
                next_scale = _of_groups(scale_ptr, row, following + chunk, K, G, GROUP, EVEN)
                if ZEROS:
                    next_zero = _of_groups(zero_ptr, row, following + chunk, K, G, GROUP, EVEN)
            acc = _step8(acc, w, scale, zero, x_ptr, begin, K, KIND, ZEROS, BY_ROW, EVEN, ROWS, DEPTH)
            w, scale, zero, begin = next_w, next_scale, next_zero, following
    acc = _step8(acc, w, scale, zero, x_ptr, begin, K, KIND, ZEROS, BY_ROW, EVEN, ROWS, DEPTH)
    _store(tl.sum(acc, 1), scale_ptr, zero_ptr, out_ptr, n, row, N, KIND, BY_ROW)
