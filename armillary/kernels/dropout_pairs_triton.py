"""The forward of bias, activation and dropout for bf16, two neighbours at a time as they lie in a word of 32 bits.

Instructions limit it, not memory: a shift and a mask take a pair apart, one comparison draws the fate of both (15
random bits each, read as bf16 numbers, whose order is that of the bits), and one product drops them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from armillary.kernels.activations_triton import act, odds_of
from armillary.kernels.philox import MASK_ROUNDS

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
def _packed(low, high, words, threshold, DROP: tl.constexpr, ASM: tl.constexpr):
    """Both as one word of two bf16 numbers, 0 where 15 bits of `words` are below the threshold, NaN where it was."""
    if ASM and DROP:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 drawn, kept, both; cvt.rn.bf16x2.f32 both, $2, $1; abs.bf16x2 drawn, $3;"
            " set.geu.bf16x2.bf16x2 kept, drawn, $4; mul.rn.bf16x2 $0, both, kept; }",
            "=r,r,r,r,r", [low, high, words, threshold], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    if DROP:
        low *= ((words & 0x7FFF) >= (threshold & 0x7FFF)).to(tl.float32)
        high *= ((words & 0x7FFF0000) >= (threshold & 0x7FFF0000)).to(tl.float32)
    low, high = low.to(tl.bfloat16).to(tl.uint16, bitcast=True), high.to(tl.bfloat16).to(tl.uint16, bitcast=True)
    return low.to(tl.int32) | (high.to(tl.int32) << 16)


@triton.jit
def _tile(
    x_ptr, y_ptr, bias_low, bias_high, seed, row, start, rows, columns, threshold, scale, over, DROP: tl.constexpr,
    ACT: tl.constexpr, HELD: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Rows `row` [HELD, 1], BLOCK columns from `start`."""
    HALF: tl.constexpr = BLOCK // 2
    column = (start // 2 + tl.arange(0, HALF))[None, :]
    at = row * (columns // 2) + column
    inside = (row < rows) & (column < columns // 2)
    x_at = x_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + at
    pair = tl.load(x_at, mask=inside, other=0) if MASKED else tl.load(x_at)
    words = pair
    if DROP:
        counter = row * (columns // 8) + (start // 8 + tl.arange(0, BLOCK // 8))[None, :]
        r0, r1, r2, r3 = draw(seed, counter)
        words = tl.reshape(tl.join(tl.join(r0, r2), tl.join(r1, r3)), [HELD, HALF]).to(tl.int32, bitcast=True)
    low = _scaled((pair << 16).to(tl.float32, bitcast=True) + bias_low, scale, over, ACT, ASM)
    high = _scaled((pair & -65536).to(tl.float32, bitcast=True) + bias_high, scale, over, ACT, ASM)
    y = _packed(low, high, words, threshold, DROP, ASM)
    y_at = y_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + at
    if MASKED:
        tl.store(y_at, y, mask=inside)
    else:
        tl.store(y_at, y)


@triton.jit
def pairs_kernel(
    x_ptr, bias_ptr, seed_ptr, y_ptr, rows, columns, pieces, threshold, scale, over, BIAS: tl.constexpr,
    DROP: tl.constexpr, ACT: tl.constexpr, HELD: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
    STAGES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """`threshold` stands in both halves of 32 bits. STAGES 0: a program is a tile; else it takes tile after tile."""
    start = (tl.program_id(0) % pieces) * BLOCK
    first = tl.program_id(0) // pieces
    held = tl.arange(0, HELD).to(tl.int64)[:, None]
    low, high = tl.zeros([1, BLOCK // 2], tl.float32), tl.zeros([1, BLOCK // 2], tl.float32)
    if BIAS:
        column = (start + tl.arange(0, BLOCK))[None, :]
        bias = tl.load(bias_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
        low, high = tl.split(tl.reshape(bias, [1, BLOCK // 2, 2]))
    seed = tl.load(seed_ptr)
    if STAGES == 0:
        _tile(x_ptr, y_ptr, low, high, seed, first * HELD + held, start, rows, columns, threshold, scale, over, DROP,
              ACT, HELD, BLOCK, MASKED, ASM)  # fmt: skip
    else:
        for block in tl.range(first, tl.cdiv(rows, HELD), tl.num_programs(0) // pieces, num_stages=STAGES):
            _tile(x_ptr, y_ptr, low, high, seed, block * HELD + held, start, rows, columns, threshold, scale, over,
                  DROP, ACT, HELD, BLOCK, MASKED, ASM)  # fmt: skip
