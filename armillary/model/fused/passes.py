"""A pre-norm block as two hand-written autograd functions around attention, which save only what they need.

`QkvFunction` is norm, fused QKV and rotary positions; `OutMlpFunction` is the output projection, residual, norm, MLP
and residual. The residual's gradient is added inside the norms' backward kernels, GEMMs take weights in the dtype they
multiply in, and with `recompute` the outputs of norms and activations are recomputed in the backward pass instead of
saved. `tests/model/fused/test_passes.py` and `test_passes_fp8.py` hold these functions to `transformer.Block`.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from armillary.kernels.gemm.gemm import Gemms
from armillary.model.layers.norm import Norm
from armillary.model.low_precision.fp8 import Fp8Gemms
from armillary.model.low_precision.weights_16bit import Weights16Bit

# M tokens (batch and time flattened), H hidden, B batch, T tokens


@dataclass(frozen=True, kw_only=True)
class FusedOptions:
    """How fused blocks compute; blocks of a model share one or two of these."""

    weights_16bit: Weights16Bit | None = None
    """16-bit copies of the weights for GEMMs; None: the weights themselves"""
    recompute: bool = False
    accumulate: bool = False
    """add weight gradients directly into .grad, in fp32: for one device, where no hook needs gradients"""
    norm_pairs: bool = False
    """second launch shape of the norm kernels (`norm_pairs`)"""
    gemms: Gemms = field(default_factory=Gemms)
    fp8: Fp8Gemms | None = None
    """GEMMs of blocks whose layers are Fp8Linear (passes_fp8.py)"""

    @property
    def residual_dtype(self) -> torch.dtype | None:
        """Dtype of the residual stream; None: that of the weights."""
        return None if self.weights_16bit is None else self.weights_16bit.dtype

    def weight(self, parameter: nn.Parameter) -> Tensor:
        return parameter.detach() if self.weights_16bit is None else self.weights_16bit.of(parameter)

    def gradient(self, parameter: Tensor, dy_MN: Tensor, x_MK: Tensor) -> Tensor | None:
        """dyᵀ·x, returned, or accumulated into the parameter's .grad."""
        if not parameter.requires_grad:
            return None
        if not self.accumulate:
            return self.gemms.weight(dy_MN, x_MK)
        first = parameter.grad is None
        if first:
            parameter.grad = torch.empty_like(parameter, dtype=torch.promote_types(parameter.dtype, torch.float32))
        with torch.no_grad():
            self.gemms.sum(parameter.grad, dy_MN, x_MK, first=first)  # type: ignore[arg-type]
        return None


def norm_arguments(norm: Norm) -> tuple[Tensor | None, Tensor | None, float, bool, bool]:
    return norm.weight, norm.bias, norm.eps, norm.kind == "rms", norm.plus_one


class QkvFunction(torch.autograd.Function):
    """x -> q, k, v and x itself, so that the residual's gradient comes back through here."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        fused: FusedOptions,
        norm: tuple[float, bool, bool],
        heads: tuple[int, int, bool],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        ops = torch.ops.armillary
        eps, rms, plus_one = norm
        weight = fused.weight(qkv)  # type: ignore[arg-type]
        normed, _, mean, rstd = ops.norm(x, None, norm_weight, norm_bias, eps, rms, plus_one, fused.norm_pairs)
        packed = fused.gemms.forward(normed, weight)
        q, k, v = ops.rope(packed, cos, sin, *heads)
        ctx.fused, ctx.norm, ctx.interleaved, ctx.qkv = fused, norm, heads[2], qkv
        ctx.save_for_backward(
            x, norm_weight, norm_bias, mean, rstd, weight, cos, sin, None if fused.recompute else normed
        )
        return q, k, v, x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor, dx: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        ops, fused, (eps, rms, plus_one) = torch.ops.armillary, ctx.fused, ctx.norm
        x, norm_weight, norm_bias, mean, rstd, weight, cos, sin, normed = ctx.saved_tensors
        dpacked = ops.rope_backward(dq, dk, dv, cos, sin, ctx.interleaved).flatten(0, 1)
        dnormed = fused.gemms.back(dpacked, weight).view_as(x)
        if normed is None:
            normed = ops.norm(x, None, norm_weight, norm_bias, eps, rms, plus_one, fused.norm_pairs)[0]
        dqkv = fused.gradient(ctx.qkv, dpacked, normed.flatten(0, 1))
        del dpacked, normed
        grads = norm_gradients(fused, dnormed, dx, x, norm_weight, norm_bias, mean, rstd, plus_one)
        return *grads, dqkv, None, None, None, None, None


class OutMlpFunction(torch.autograd.Function):
    """Attention's output and the residual -> the block's output."""

    @staticmethod
    def forward(
        ctx: Any,
        mixed: Tensor,
        x: Tensor,
        out: Tensor,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
        up: Tensor,
        down: Tensor,
        fused: FusedOptions,
        norm: tuple[float, bool, bool],
        activation: tuple[str, bool],
    ) -> Tensor:
        ops = torch.ops.armillary
        weights = [fused.weight(w) for w in (out, up, down)]  # type: ignore[arg-type]
        summed, normed, mean, rstd = _sum_and_norm(fused, mixed, weights[0], x, norm_weight, norm_bias, norm)
        inner = fused.gemms.forward(normed, weights[1])
        active = ops.activate(inner, *activation)
        ctx.fused, ctx.norm, ctx.activation, ctx.parameters = fused, norm, activation, (out, up, down)
        saved = (None, None) if fused.recompute else (normed, active)
        ctx.save_for_backward(mixed, summed, norm_weight, norm_bias, mean, rstd, inner, *weights, *saved)
        return fused.gemms.forward(active, weights[2], summed)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        ops, fused, (eps, rms, plus_one), (out, up, down) = torch.ops.armillary, ctx.fused, ctx.norm, ctx.parameters
        mixed, x, norm_weight, norm_bias, mean, rstd, inner, *rest = ctx.saved_tensors
        out_weight, up_weight, down_weight, normed, active = rest
        dy = dy.contiguous()
        dactive = fused.gemms.back(dy, down_weight)
        if active is None:
            dinner, active = ops.activate_backward_again(dactive, inner, *ctx.activation)
        else:
            dinner = ops.activate_backward(dactive, inner, *ctx.activation)
        dinner = dinner.flatten(0, 1)
        del dactive
        ddown = fused.gradient(down, dy.flatten(0, 1), active.flatten(0, 1))
        del active, rest
        if normed is None:
            normed = ops.norm(x, None, norm_weight, norm_bias, eps, rms, plus_one, fused.norm_pairs)[0]
        dnormed = fused.gemms.back(dinner, up_weight).view_as(x)
        dup = fused.gradient(up, dinner, normed.flatten(0, 1))
        del dinner, normed
        dx, dweight, dbias = norm_gradients(fused, dnormed, dy, x, norm_weight, norm_bias, mean, rstd, plus_one)
        dmixed = fused.gemms.back(dx, out_weight)
        dout = fused.gradient(out, dx.flatten(0, 1), mixed.flatten(0, 1))
        return dmixed, dx, dout, dweight, dbias, dup, ddown, None, None, None


def _sum_and_norm(
    fused: FusedOptions,
    mixed: Tensor,
    weight: Tensor,
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    norm: tuple[float, bool, bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(sum of residual and projection, its norm, mean, 1 / deviation): added inside the GEMM or the norm kernel."""
    norm_of, (eps, rms, plus_one) = torch.ops.armillary.norm, norm
    arguments = (norm_weight, norm_bias, eps, rms, plus_one, fused.norm_pairs)
    if fused.gemms.fused_add:
        summed = fused.gemms.forward(mixed, weight, x)
        normed, _, mean, rstd = norm_of(summed, None, *arguments)
    else:
        normed, summed, mean, rstd = norm_of(fused.gemms.forward(mixed, weight), x, *arguments)
    return summed, normed, mean, rstd


def norm_gradients(
    fused: FusedOptions,
    dnormed: Tensor,
    dresidual: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    plus_one: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of a norm's input, with that of the residual added, weight and bias; None where one is not trained."""
    dx, *grads = torch.ops.armillary.norm_backward(
        dnormed, dresidual, x, weight, mean, rstd, plus_one, bias is not None, fused.norm_pairs
    )
    trained = [parameter is not None and parameter.requires_grad for parameter in (weight, bias)]
    dweight, dbias = (grad if wanted else None for grad, wanted in zip(grads, trained, strict=True))
    return dx, dweight, dbias
