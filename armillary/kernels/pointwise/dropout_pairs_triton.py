"""Bias, activation and dropout for bf16, forward and backward, two neighbours at a time, as a 32-bit word holds them.

Instructions limit it, not memory: a shift and a mask take a pair apart, one comparison draws the fate of both (15
random bits each, read as bf16 numbers, whose order is that of the bits), and one product drops them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from armillary.kernels.core.philox import MASK_ROUNDS
from armillary.kernels.core.prefetch_triton import STREAM
from armillary.kernels.pointwise.functions_triton import act, act_and_slope, odds_of, through

_ROUNDS: tl.constexpr = tl.constexpr(MASK_ROUNDS)


@triton.jit
def draw(seed, counter):
    """Four words of 32 bits for each counter."""
    low = (counter & 0xFFFFFFFF).to(tl.uint32)
    high = (counter >> 32).to(tl.uint32)
    return tl.philox(seed, low, high, low * 0, low * 0, _ROUNDS)


@triton.jit
def _over(x, divisor, ASM: tl.constexpr):
    """x / divisor by the GPU's own reciprocal, a bit or two off; the interpreter divides."""
    if ASM:
        inverse = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=r,r", [divisor], dtype=tl.float32, is_pure=True, pack=1
        )
        return x * inverse
    return x / divisor


@triton.jit
def _scaled(x, scale, over, ACT: tl.constexpr, ASM: tl.constexpr):
    """scale · act(x); `over` is 1 / scale. What is a sigmoid takes it in its stride: x / (over + odds · over)."""
    if ACT == "silu" or ACT == "gelu" or ACT == "gelu_tanh":
        return _over(x, odds_of(x, ACT) * over + over, ASM)
    return act(x, ACT, True) * scale


@triton.jit
def _words(seed, row, start, columns, HELD: tl.constexpr, BLOCK: tl.constexpr):
    """Random words, one for each pair of a tile."""
    counter = row * (columns // 8) + (start // 8 + tl.arange(0, BLOCK // 8))[None, :]
    r0, r1, r2, r3 = draw(seed, counter)
    return tl.reshape(tl.join(tl.join(r0, r2), tl.join(r1, r3)), [HELD, BLOCK // 2]).to(tl.int32, bitcast=True)


@triton.jit
def _kept(pair, words, threshold, ASM: tl.constexpr):
    """Two bf16 numbers in a word, times 0 where 15 bits of `words` are below the threshold: NaN stays."""
    if ASM:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 drawn, kept; abs.bf16x2 drawn, $2; set.geu.bf16x2.bf16x2 kept, drawn, $3;"
            " mul.rn.bf16x2 $0, $1, kept; }",
            "=r,r,r,r",
            [pair, words, threshold],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    low, high = _apart(pair)
    low *= ((words & 0x7FFF) >= (threshold & 0x7FFF)).to(tl.float32)
    high *= ((words & 0x7FFF0000) >= (threshold & 0x7FFF0000)).to(tl.float32)
    return _together(low, high, False)


@triton.jit
def _apart(pair):
    """A word of two bf16 numbers as two in fp32: a shift and a mask."""
    return (pair << 16).to(tl.float32, bitcast=True), (pair & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _together(low, high, ASM: tl.constexpr):
    """Two numbers in fp32 as a word of two in bf16."""
    if ASM:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [low, high], dtype=tl.int32, is_pure=True, pack=1
        )
    low, high = low.to(tl.bfloat16).to(tl.uint16, bitcast=True), high.to(tl.bfloat16).to(tl.uint16, bitcast=True)
    return low.to(tl.int32) | (high.to(tl.int32) << 16)


@triton.jit
def _load(ptr, at, inside, MASKED: tl.constexpr):
    """Pairs, as words."""
    ptr = ptr.to(tl.pointer_type(tl.int32), bitcast=True) + at
    return tl.load(ptr, mask=inside, other=0) if MASKED else tl.load(ptr)


@triton.jit
def _store(ptr, at, pair, inside, MASKED: tl.constexpr):
    ptr = ptr.to(tl.pointer_type(tl.int32), bitcast=True) + at
    if MASKED:
        tl.store(ptr, pair, mask=inside, cache_modifier=STREAM)
    else:
        tl.store(ptr, pair, cache_modifier=STREAM)


@triton.jit
def _bias_of(bias_ptr, start, columns, BIAS: tl.constexpr, BLOCK: tl.constexpr):
    """The bias of the even and of the odd columns; zeros where there is none."""
    low, high = tl.zeros([1, BLOCK // 2], tl.float32), tl.zeros([1, BLOCK // 2], tl.float32)
    if BIAS:
        column = (start + tl.arange(0, BLOCK))[None, :]
        bias = tl.load(bias_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
        low, high = tl.split(tl.reshape(bias, [1, BLOCK // 2, 2]))
    return low, high


@triton.jit
def forward_pairs(
    x_ptr,
    bias_ptr,
    seed_ptr,
    y_ptr,
    rows,
    columns,
    pieces,
    threshold,
    scale,
    over,
    BIAS: tl.constexpr,
    DROP: tl.constexpr,
    ACT: tl.constexpr,
    HELD: tl.constexpr,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
    ASM: tl.constexpr,
):
    """A program is HELD rows of one of `pieces` of BLOCK columns. `threshold` stands in both halves of 32 bits."""
    start = (tl.program_id(0) % pieces) * BLOCK
    row = (tl.program_id(0) // pieces).to(tl.int64) * HELD + tl.arange(0, HELD)[:, None]
    column = (start // 2 + tl.arange(0, BLOCK // 2))[None, :]
    at, inside = row * (columns // 2) + column, (row < rows) & (column < columns // 2)
    bias_low, bias_high = _bias_of(bias_ptr, start, columns, BIAS, BLOCK)
    low, high = _apart(_load(x_ptr, at, inside, MASKED))
    low = _scaled(low + bias_low, scale, over, ACT, ASM)
    high = _scaled(high + bias_high, scale, over, ACT, ASM)
    pair = _together(low, high, ASM)
    if DROP:
        pair = _kept(pair, _words(tl.load(seed_ptr), row, start, columns, HELD, BLOCK), threshold, ASM)
    _store(y_ptr, at, pair, inside, MASKED)


@triton.jit
def backward_pairs(
    dy_ptr,
    x_ptr,
    bias_ptr,
    seed_ptr,
    dx_ptr,
    parts_ptr,
    rows,
    columns,
    threshold,
    scale,
    BIAS: tl.constexpr,
    DROP: tl.constexpr,
    ACT: tl.constexpr,
    HELD: tl.constexpr,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
    ASM: tl.constexpr,
):
    """Program (BLOCK columns, some rows, HELD at a time); `parts` gets what it adds to the bias's gradient."""
    start = tl.program_id(0) * BLOCK
    column = (start // 2 + tl.arange(0, BLOCK // 2))[None, :]
    bias_low, bias_high = _bias_of(bias_ptr, start, columns, BIAS, BLOCK)
    seed = tl.load(seed_ptr)
    sum_low, sum_high = tl.zeros([HELD, BLOCK // 2], tl.float32), tl.zeros([HELD, BLOCK // 2], tl.float32)
    for block in range(tl.program_id(1), tl.cdiv(rows, HELD), tl.num_programs(1)):
        row = block * HELD + tl.arange(0, HELD).to(tl.int64)[:, None]
        at, inside = row * (columns // 2) + column, (row < rows) & (column < columns // 2)
        pair = _load(dy_ptr, at, inside, MASKED)
        x_pair = _load(x_ptr, at, inside, MASKED) if ACT != "none" else pair
        if DROP:
            pair = _kept(pair, _words(seed, row, start, columns, HELD, BLOCK), threshold, ASM)
        low, high = _apart(pair)
        low, high = low * scale, high * scale
        if ACT != "none":
            x_low, x_high = _apart(x_pair)
            x_low, x_high = x_low + bias_low, x_high + bias_high
            _, slope = act_and_slope(x_low, ACT, True)
            low = through(low, slope, x_low, ACT)
            _, slope = act_and_slope(x_high, ACT, True)
            high = through(high, slope, x_high, ACT)
        if BIAS:  # beyond the edges dy is 0
            sum_low, sum_high = sum_low + low, sum_high + high
        _store(dx_ptr, at, _together(low, high, ASM), inside, MASKED)
    if BIAS:
        part = parts_ptr + tl.program_id(1).to(tl.int64) * columns + 2 * column
        tl.store(part, tl.sum(sum_low, axis=0, keep_dims=True), mask=column < columns // 2)
        tl.store(part + 1, tl.sum(sum_high, axis=0, keep_dims=True), mask=column < columns // 2)
