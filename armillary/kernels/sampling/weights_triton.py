"""Scores and integer weights of tokens, bit-equal to `armillary.kernels.sampling.sampling`.

Kernels that use these are launched with `enable_fp_fusion=False`: a fused multiply-add would round once, not twice.
"""

import triton
import triton.language as tl

from armillary.kernels.sampling.sampling import EXP2, LOG2E, ONE

_E: tl.constexpr = tl.constexpr(EXP2)
_LOG2E: tl.constexpr = tl.constexpr(LOG2E)
_ONE: tl.constexpr = tl.constexpr(ONE)
_UNIT: tl.constexpr = tl.constexpr(2.0**ONE)


@triton.jit
def scores_of(
    b,
    token,
    source,
    V: tl.constexpr,
    WORDS: tl.constexpr,
    PENALTIES: tl.constexpr,
    ROWS: tl.constexpr,
    ALLOWED: tl.constexpr,
):
    """Scores of some tokens of row b; -inf where there are none. `source` is (logits, repetition, presence, frequency,
    counts, prompt, rows, allowed)."""
    logits, repetition, presence, frequency, counts, prompt, rows, allowed = source
    there = token < V
    x = tl.load(logits + b.to(tl.int64) * V + token, mask=there, other=float("-inf")).to(tl.float32)
    if PENALTIES:
        state = tl.load(rows + b).to(tl.int64) if ROWS else b.to(tl.int64)
        count = tl.load(counts + state * V + token, mask=there, other=0)
        in_prompt = tl.load(prompt + state * V + token, mask=there, other=0).to(tl.int32)
        factor = tl.where((in_prompt != 0) | (count > 0), tl.load(repetition + b).to(tl.float32), 1.0)
        x = tl.where(x > 0, tl.div_rn(x, factor), x * factor)
        x = x - tl.load(frequency + b).to(tl.float32) * count.to(tl.float32)
        x = x - tl.where(count > 0, tl.load(presence + b).to(tl.float32), 0.0)
    if ALLOWED:
        word = tl.load(allowed + b.to(tl.int64) * WORDS + token // 32, mask=there, other=0)
        x = tl.where((word >> (token % 32)) & 1 == 1, x, float("-inf"))
    return tl.where(there, x, float("-inf"))


@triton.jit
def factor_of(temperature, b):
    """log2 e over the temperature of a row."""
    heat = tl.load(temperature + b).to(tl.float32)
    return tl.div_rn(tl.zeros([], tl.float32) + _LOG2E, tl.where(heat > 0, heat, 1.0))


@triton.jit
def weights_of(scores, top, factor):
    """2^((score - top) · factor) in fp32, at most 1."""
    below = tl.where(scores == top, 0.0, scores) - tl.where(scores == top, 0.0, top)  # inf - inf is NaN
    power = tl.where(scores == top, 0.0, tl.maximum(below * factor, -_ONE - 2.0))
    exponent = tl.floor(power + 0.5)
    part = power - exponent
    value = tl.full(part.shape, _E[5], tl.float32)
    value = value * part + _E[4]
    value = value * part + _E[3]
    value = value * part + _E[2]
    value = value * part + _E[1]
    value = value * part + _E[0]
    value = value * part + 1.0
    return value * ((exponent.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def mass_of(weights):
    return (weights * _UNIT).to(tl.int64)


@triton.jit
def least_of(min_p, b):
    """The mass that min-p requires; the likeliest token always has it."""
    least = tl.load(min_p + b).to(tl.float32)
    return mass_of(tl.where(least > 1.0, 1.0, least))


@triton.jit
def share_of(total, fraction, BITS: tl.constexpr):
    """⌊total · fraction / 2^BITS⌋."""
    return (((total >> 32) * fraction) << (32 - BITS)) + (((total & 0xFFFFFFFF) * fraction) >> BITS)
