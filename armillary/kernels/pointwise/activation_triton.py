"""MLP activations in Triton: gate and up are separated in registers, so memory is read and written in one stream.

The arithmetic is in fp32, and NaN propagates, as in torch. FAST is for inputs of a 16-bit dtype: the normal
distribution function is then an exponential of a polynomial, and there is no division, because the exact formulas take
more arithmetic than a GPU can do at copy bandwidth.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from armillary.kernels.core.launch import ceil_div, on

_BLOCK, _WARPS = 2048, 4
_LIMIT: tl.constexpr = tl.constexpr(7.0)
_ALPHA: tl.constexpr = tl.constexpr(1.702)
_SQRT_HALF: tl.constexpr = tl.constexpr(0.7071067811865476)
_MINUS_LOG2E: tl.constexpr = tl.constexpr(-1.4426950408889634)
_MINUS_HALF_LOG2E: tl.constexpr = tl.constexpr(-0.7213475204444817)
_ONE_OVER_SQRT_TAU: tl.constexpr = tl.constexpr(0.3989422804014327)
_TANH_SCALE: tl.constexpr = tl.constexpr(0.7978845608028654)  # sqrt(2 / π)
_TANH_CUBE: tl.constexpr = tl.constexpr(0.044715)


def activate(x: Tensor, activation: str, gated: bool) -> Tensor:
    """activation.activate in one kernel."""
    return _activate(x, activation, gated)


@torch.library.custom_op(
    "armillary::activate", mutates_args=(), schema="(Tensor x, str activation, bool gated) -> Tensor"
)
def _activate(x: Tensor, activation: str, gated: bool) -> Tensor:
    y = _empty_activate(x, activation, gated)
    count = y.numel()
    if count:
        with on(x):
            _forward_kernel[(ceil_div(count, _BLOCK),)](
                x.contiguous(), y, count, ACT=activation, GATED=gated, BLOCK=_BLOCK, num_warps=_WARPS
            )
    return y


@_activate.register_fake
def _empty_activate(x: Tensor, activation: str, gated: bool) -> Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // (2 if gated else 1))


@torch.library.custom_op(
    "armillary::activate_backward",
    mutates_args=(),
    schema="(Tensor dy, Tensor x, str activation, bool gated) -> Tensor",
)
def _activate_backward(dy: Tensor, x: Tensor, activation: str, gated: bool) -> Tensor:
    dx = _empty_backward(dy, x, activation, gated)
    _launch_backward(dy, x, dx, None, activation, gated)
    return dx


@_activate_backward.register_fake
def _empty_backward(dy: Tensor, x: Tensor, activation: str, gated: bool) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op(
    "armillary::activate_backward_again",
    mutates_args=(),
    schema="(Tensor dy, Tensor x, str activation, bool gated) -> (Tensor, Tensor)",
)
def _activate_backward_again(dy: Tensor, x: Tensor, activation: str, gated: bool) -> tuple[Tensor, Tensor]:
    """The gradient, and the recomputed activation, for callers that did not keep it."""
    dx, y = _empty_backward_again(dy, x, activation, gated)
    _launch_backward(dy, x, dx, y, activation, gated)
    return dx, y


@_activate_backward_again.register_fake
def _empty_backward_again(dy: Tensor, x: Tensor, activation: str, gated: bool) -> tuple[Tensor, Tensor]:
    return _empty_backward(dy, x, activation, gated), _empty_activate(x, activation, gated)


def _launch_backward(dy: Tensor, x: Tensor, dx: Tensor, y: Tensor | None, activation: str, gated: bool) -> None:
    count = dy.numel()
    if count:
        with on(x):
            _backward_kernel[(ceil_div(count, _BLOCK),)](
                dy.contiguous(),
                x.contiguous(),
                dx,
                dx if y is None else y,
                count,
                ACT=activation,
                GATED=gated,
                AGAIN=y is not None,
                BLOCK=_BLOCK,
                num_warps=_WARPS,
            )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.activation, ctx.gated = inputs
    ctx.save_for_backward(x)


def _gradients(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    (x,) = ctx.saved_tensors
    return _activate_backward(dy, x, ctx.activation, ctx.gated), None, None


_activate.register_autograd(_gradients, setup_context=_setup_context)


# --- activation functions and their derivatives


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
def _normal_tail(x):
    """(min(|x|, 13.2), Φ(−that)): log2 Φ by a polynomial of degree 7, with an error of at most 1.2e-4 of Φ up to 4.5
    and 4e-3 beyond, where gelu is below 2e-5."""
    magnitude = tl.minimum(tl.abs(x), 13.2)
    log = -5.75724346e-07 * magnitude + 2.86178495e-05
    log = log * magnitude - 5.93295068e-04
    log = log * magnitude + 6.81817601e-03
    log = log * magnitude - 4.96614265e-02
    log = log * magnitude - 4.63634263e-01
    log = log * magnitude - 1.14892164e00
    return magnitude, tl.exp2(log * magnitude - 1.00016915e00)


@triton.jit
def activated_pairs(gate_up, CLAMPED: tl.constexpr):
    """[…, N, 2] of gate and up -> […, N]: SwiGLU, or its clamped form."""
    gate, up = tl.split(gate_up)
    if CLAMPED:
        gate = tl.where(gate > _LIMIT, _LIMIT, gate)
        up = tl.where(up > _LIMIT, _LIMIT, tl.where(up < -_LIMIT, -_LIMIT, up))
        return (up + 1.0) * gate * tl.sigmoid(gate * _ALPHA)
    else:
        return gate * tl.sigmoid(gate) * up


@triton.jit
def act(x, NAME: tl.constexpr, FAST: tl.constexpr):
    """silu, gelu, gelu_tanh, relu, relu2 or none."""
    if NAME == "silu":
        y = x * sigmoid(x, 1.0, FAST)
    elif NAME == "gelu":
        if FAST:
            magnitude, tail = _normal_tail(x)
            y = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL) - magnitude * tail
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
            _, tail = _normal_tail(x)
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


# --- kernels


@triton.jit
def gated_act(gate, up, ACT: tl.constexpr, FAST: tl.constexpr):
    """act(gate)·up, or GPT-OSS's clamped form."""
    if ACT == "swiglu_clamped":
        gate = tl.where(gate > _LIMIT, _LIMIT, gate)
        up = tl.where(up > _LIMIT, _LIMIT, tl.where(up < -_LIMIT, -_LIMIT, up))
        y = (up + 1.0) * gate * sigmoid(gate, _ALPHA, FAST)
    else:
        y = act(gate, ACT, FAST) * up
    return y


@triton.jit
def gated_act_back(dy, gate, up, ACT: tl.constexpr, FAST: tl.constexpr):
    """(the activation, gradient of the gate, gradient of up)."""
    if ACT == "swiglu_clamped":
        low = tl.where(gate > _LIMIT, _LIMIT, gate)
        s = sigmoid(low, _ALPHA, FAST)
        clamped = tl.where(up > _LIMIT, _LIMIT, tl.where(up < -_LIMIT, -_LIMIT, up))
        dgate = tl.where(gate <= _LIMIT, dy * (clamped + 1.0) * (s + _ALPHA * low * s * (1.0 - s)), 0.0)
        dup = tl.where((up >= -_LIMIT) & (up <= _LIMIT), dy * low * s, 0.0)
        y = (clamped + 1.0) * low * s
    else:
        y, slope = act_and_slope(gate, ACT, FAST)
        dgate = through(dy * up, slope, gate, ACT)
        dup = dy * y
        y *= up
    return y, dgate, dup


@triton.jit
def _split_pairs(x_ptr, start, count, BLOCK: tl.constexpr):
    """BLOCK gates and BLOCK ups from 2 · BLOCK alternating elements."""
    at = 2 * start + tl.arange(0, 2 * BLOCK)
    both = tl.load(x_ptr + at, mask=at < 2 * count, other=0.0).to(tl.float32)
    gate, up = tl.split(tl.reshape(both, [BLOCK, 2]))
    return gate, up


@triton.jit
def _forward_kernel(x_ptr, y_ptr, count, ACT: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr):
    FAST: tl.constexpr = x_ptr.dtype.element_ty != tl.float32
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = start + tl.arange(0, BLOCK)
    if GATED:
        gate, up = _split_pairs(x_ptr, start, count, BLOCK)
        y = gated_act(gate, up, ACT, FAST)
    else:
        y = act(tl.load(x_ptr + at, mask=at < count, other=0.0).to(tl.float32), ACT, FAST)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=at < count)


@triton.jit
def _backward_kernel(
    dy_ptr,
    x_ptr,
    dx_ptr,
    y_ptr,
    count,
    ACT: tl.constexpr,
    GATED: tl.constexpr,
    AGAIN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    FAST: tl.constexpr = x_ptr.dtype.element_ty != tl.float32
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = start + tl.arange(0, BLOCK)
    dy = tl.load(dy_ptr + at, mask=at < count, other=0.0).to(tl.float32)
    if GATED:
        gate, up = _split_pairs(x_ptr, start, count, BLOCK)
        y, dgate, dup = gated_act_back(dy, gate, up, ACT, FAST)
        both = tl.reshape(tl.join(dgate, dup), [2 * BLOCK])
        to = 2 * start + tl.arange(0, 2 * BLOCK)
        tl.store(dx_ptr + to, both.to(dx_ptr.dtype.element_ty), mask=to < 2 * count)
    else:
        x = tl.load(x_ptr + at, mask=at < count, other=0.0).to(tl.float32)
        y, slope = act_and_slope(x, ACT, FAST)
        tl.store(dx_ptr + at, through(dy, slope, x, ACT).to(dx_ptr.dtype.element_ty), mask=at < count)
    if AGAIN:
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=at < count)
