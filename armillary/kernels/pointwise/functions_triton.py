"""Activation functions and their derivatives in fp32, for use inside kernels.

NaN propagates through all of them, as in torch. FAST is for inputs of a 16-bit dtype: the normal distribution function
is then an exponential of a polynomial, and there is no division, because the exact formulas take more arithmetic than a
GPU can do at copy bandwidth.
"""

import triton
import triton.language as tl

_SQRT_HALF: tl.constexpr = tl.constexpr(0.7071067811865476)
_MINUS_LOG2E: tl.constexpr = tl.constexpr(-1.4426950408889634)
_MINUS_HALF_LOG2E: tl.constexpr = tl.constexpr(-0.7213475204444817)
_ONE_OVER_SQRT_TAU: tl.constexpr = tl.constexpr(0.3989422804014327)
_TANH_SCALE: tl.constexpr = tl.constexpr(0.7978845608028654)  # sqrt(2 / π)
_TANH_CUBE: tl.constexpr = tl.constexpr(0.044715)


@triton.jit
def sigmoid(x, SCALE: tl.constexpr, FAST: tl.constexpr):
    """sigmoid(SCALE · x)."""
    if FAST:  # a squared reciprocal square root is one GPU instruction, where a division takes eight
        root = tl.rsqrt(1.0 + tl.exp2(x * (SCALE * _MINUS_LOG2E)))
        return root * root
    return tl.sigmoid(x * SCALE)


@triton.jit
def _tanh_sigmoid(x, square, FAST: tl.constexpr):
    """(1 + tanh u) / 2 = sigmoid(2 u) with u = sqrt(2 / π)·(x + 0.044715·x³)."""
    if FAST:
        scale: tl.constexpr = 2.0 * _TANH_SCALE * _MINUS_LOG2E
        root = tl.rsqrt(1.0 + tl.exp2(x * (square * (scale * _TANH_CUBE) + scale)))
        return root * root
    return tl.sigmoid((x + square * x * _TANH_CUBE) * (2.0 * _TANH_SCALE))


@triton.jit
def _far_tail(x):
    """(min(|x|, 13.2), Φ(−that)): log2 Φ by a polynomial of degree 7, with an error of at most 1.2e-4 of Φ up to 4.5
    and 4e-3 beyond, where gelu is below 2e-5."""
    far = tl.minimum(tl.abs(x), 13.2)
    log = -5.75724346e-07 * far + 2.86178495e-05
    log = log * far - 5.93295068e-04
    log = log * far + 6.81817601e-03
    log = log * far - 4.96614265e-02
    log = log * far - 4.63634263e-01
    log = log * far - 1.14892164e00
    return far, tl.exp2(log * far - 1.00016915e00)


@triton.jit
def act(x, NAME: tl.constexpr, FAST: tl.constexpr):
    """silu, gelu, gelu_tanh, relu, relu2 or none."""
    if NAME == "silu":
        y = x * sigmoid(x, 1.0, FAST)
    elif NAME == "gelu":
        if FAST:
            far, tail = _far_tail(x)
            y = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL) - far * tail
        else:
            y = 0.5 * x * (1.0 + tl.erf(x * _SQRT_HALF))
    elif NAME == "gelu_tanh":
        y = x * _tanh_sigmoid(x, x * x, FAST)
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
        s = sigmoid(x, 1.0, FAST)
        y = x * s
        slope = s + y * (1.0 - s)
    elif NAME == "gelu":
        if FAST:
            _, tail = _far_tail(x)
            below = tl.where(x > 0.0, 1.0 - tail, tail)
        else:
            below = 0.5 * (1.0 + tl.erf(x * _SQRT_HALF))
        y = x * below
        slope = below + x * (tl.exp2(x * x * _MINUS_HALF_LOG2E) * _ONE_OVER_SQRT_TAU)
    elif NAME == "gelu_tanh":
        square = x * x
        s = _tanh_sigmoid(x, square, FAST)
        y = x * s
        slope = s + y * (1.0 - s) * (square * (6.0 * _TANH_SCALE * _TANH_CUBE) + 2.0 * _TANH_SCALE)
    elif NAME == "relu":
        y = tl.where(x <= 0.0, 0.0, x)
        slope = tl.where(x <= 0.0, 0.0, 1.0)
    elif NAME == "relu2":
        y = tl.where(x <= 0.0, 0.0, x * x)
        slope = tl.where(x <= 0.0, 0.0, 2.0 * x)
    else:
        tl.static_assert(NAME == "none")
        y = x
        slope = tl.full(x.shape, 1.0, tl.float32)
    return y, slope


@triton.jit
def through(dy, slope, x, NAME: tl.constexpr):
    """The gradient through an activation. Below zero a ReLU's gradient is zero, even for an infinite dy."""
    if NAME == "relu" or NAME == "relu2":
        return tl.where(x <= 0.0, 0.0, dy * slope)
    return dy * slope
