"""The activation functions and their derivatives on fp32 numbers, for kernels to build on.

NaN goes through every one of them, as in torch. FAST is for numbers that came from a half format: the normal
distribution function is then an exponential of a polynomial, right to 5e-5 of itself, because the exact one takes more
arithmetic than a GPU can do while it copies.
"""

from __future__ import annotations

import triton
import triton.language as tl

_SQRT_HALF: tl.constexpr = tl.constexpr(0.7071067811865476)
_MINUS_HALF_LOG2E: tl.constexpr = tl.constexpr(-0.7213475204444817)
_ONE_OVER_SQRT_TAU: tl.constexpr = tl.constexpr(0.3989422804014327)
_TANH_SCALE: tl.constexpr = tl.constexpr(0.7978845608028654)  # sqrt(2 / π)
_TANH_CUBE: tl.constexpr = tl.constexpr(0.044715)


@triton.jit
def normal_below(x, FAST: tl.constexpr):
    """Φ(x), the share of a normal distribution below x."""
    if FAST:  # log2 Φ(−|x|) by a polynomial of degree 9, fitted at Chebyshev nodes up to where fp32 ends
        far = tl.minimum(tl.abs(x), 13.2)
        log = -1.93238066e-09 * far + 1.41029394e-07
        log = log * far - 4.52489884e-06
        log = log * far + 8.44840090e-05
        log = log * far - 1.02789312e-03
        log = log * far + 8.70234355e-03
        log = log * far - 5.40633854e-02
        log = log * far - 4.58617463e-01
        log = log * far - 1.15110527
        tail = tl.exp2(log * far - 1.0000093)
        return tl.where(x > 0.0, 1.0 - tail, tail)
    return 0.5 * (1.0 + tl.erf(x * _SQRT_HALF))


@triton.jit
def act(x, NAME: tl.constexpr, FAST: tl.constexpr):
    """silu, gelu, gelu_tanh, relu, relu2 or none."""
    if NAME == "silu":
        y = x * tl.sigmoid(x)
    elif NAME == "gelu":
        y = x * normal_below(x, FAST)
    elif NAME == "gelu_tanh":  # (1 + tanh u) / 2 is sigmoid(2 u)
        y = x * tl.sigmoid(2.0 * _TANH_SCALE * (x + _TANH_CUBE * x * x * x))
    elif NAME == "relu":
        y = tl.where(x <= 0.0, 0.0, x)
    elif NAME == "relu2":
        y = tl.where(x <= 0.0, 0.0, x * x)
    else:
        tl.static_assert(NAME == "none")
        y = x
    return y


@triton.jit
def act_and_slope(x, NAME: tl.constexpr, FAST: tl.constexpr):
    """(act(x), its derivative)."""
    if NAME == "silu":
        s = tl.sigmoid(x)
        y = x * s
        slope = s + y * (1.0 - s)
    elif NAME == "gelu":
        below = normal_below(x, FAST)
        y = x * below
        slope = below + x * (tl.exp2(x * x * _MINUS_HALF_LOG2E) * _ONE_OVER_SQRT_TAU)
    elif NAME == "gelu_tanh":
        s = tl.sigmoid(2.0 * _TANH_SCALE * (x + _TANH_CUBE * x * x * x))
        y = x * s
        slope = s + y * (1.0 - s) * (2.0 * _TANH_SCALE) * (1.0 + 3.0 * _TANH_CUBE * x * x)
    elif NAME == "relu":
        y = tl.where(x <= 0.0, 0.0, x)
        slope = tl.where(x <= 0.0, 0.0, 1.0)
    elif NAME == "relu2":
        y = tl.where(x <= 0.0, 0.0, x * x)
        slope = tl.where(x <= 0.0, 0.0, 2.0 * x)
    else:
        tl.static_assert(NAME == "none")
        y = x
        slope = 1.0 + 0.0 * x
    return y, slope
