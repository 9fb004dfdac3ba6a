"""MLP activations in Triton: gate and up are separated in registers, so memory is read and written in one stream."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from armillary.kernels.core.launch import ceil_div, on
from armillary.kernels.pointwise.functions_triton import act, act_and_slope, sigmoid, through

_BLOCK, _WARPS = 2048, 4
_LIMIT: tl.constexpr = tl.constexpr(7.0)
_ALPHA: tl.constexpr = tl.constexpr(1.702)


def activate(x: Tensor, activation: str, gated: bool) -> Tensor:
    """activation.activate in one kernel."""
    result: Tensor = _activate(x, activation, gated)
    return result


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
    count = dy.numel()
    if count:
        with on(x):
            _backward_kernel[(ceil_div(count, _BLOCK),)](
                dy.contiguous(),
                x.contiguous(),
                dx,
                dx,
                count,
                ACT=activation,
                GATED=gated,
                AGAIN=False,
                BLOCK=_BLOCK,
                num_warps=_WARPS,
            )
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
    count = dy.numel()
    if count:
        with on(x):
            _backward_kernel[(ceil_div(count, _BLOCK),)](
                dy.contiguous(),
                x.contiguous(),
                dx,
                y,
                count,
                ACT=activation,
                GATED=gated,
                AGAIN=True,
                BLOCK=_BLOCK,
                num_warps=_WARPS,
            )
    return dx, y


@_activate_backward_again.register_fake
def _empty_backward_again(dy: Tensor, x: Tensor, activation: str, gated: bool) -> tuple[Tensor, Tensor]:
    return _empty_backward(dy, x, activation, gated), _empty_activate(x, activation, gated)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.activation, ctx.gated = inputs
    ctx.save_for_backward(x)


def _gradients(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    (x,) = ctx.saved_tensors
    return _activate_backward(dy, x, ctx.activation, ctx.gated), None, None


_activate.register_autograd(_gradients, setup_context=_keep)


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
        held = tl.where(up > _LIMIT, _LIMIT, tl.where(up < -_LIMIT, -_LIMIT, up))
        dgate = tl.where(gate <= _LIMIT, dy * (held + 1.0) * (s + _ALPHA * low * s * (1.0 - s)), 0.0)
        dup = tl.where((up >= -_LIMIT) & (up <= _LIMIT), dy * low * s, 0.0)
        y = (held + 1.0) * low * s
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
