"""The two functions of a fused block with fp8 GEMMs: every operand is written in fp8 by the kernel that computes it.

As in passes.py, but a tensor that is only multiplied is never written in bf16: norms, activations and their gradients
are quantised in both layouts by their own kernels, and the backward pass keeps the transposed fp8 operands, half the
bytes.
"""

from typing import Any

import torch
from torch import Tensor, nn

from armillary.kernels.fp8.linear import E4M3, E5M2
from armillary.kernels.fp8.operands import Operand, ScaledTensor, Source, norm_source
from armillary.model.fused.passes import FusedOptions, norm_gradients
from armillary.model.low_precision.fp8 import present

# M tokens (batch and time flattened), H hidden


def _saved(operand: Operand, *, recompute: bool) -> tuple[Tensor | None, Tensor | None]:
    """For the backward pass: the transposed operand, or the statistics to recompute it with."""
    return (operand.known, None) if recompute else present(operand.transposed)


class Fp8QkvFunction(torch.autograd.Function):
    """x -> q, k, v and x itself, so that the residual's gradient comes back through here."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
        qkv: nn.Parameter,
        cos: Tensor,
        sin: Tensor,
        fused: FusedOptions,
        norm: tuple[float, bool, bool],
        heads: tuple[int, int, bool],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        fp8, recompute = fused.fp8, fused.recompute
        assert fp8 is not None
        source = norm_source(x, norm_weight, norm_bias, *norm)
        normed = fp8.make(source, E4M3, transposed=not recompute)
        q, k, v = torch.ops.armillary.rope(fp8.forward(normed, qkv, x), cos, sin, *heads)
        ctx.fused, ctx.norm, ctx.interleaved, ctx.qkv = fused, norm, heads[2], qkv
        stats = source.mean, source.rstd
        ctx.save_for_backward(x, norm_weight, norm_bias, *stats, cos, sin, *_saved(normed, recompute=recompute))
        return q, k, v, x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor, dx: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        ops, fused, (eps, rms, plus_one) = torch.ops.armillary, ctx.fused, ctx.norm
        x, norm_weight, norm_bias, mean, rstd, cos, sin, *saved = ctx.saved_tensors
        fp8, accumulate = fused.fp8, fused.accumulate
        dpacked = fp8.quantise(ops.rope_backward(dq, dk, dv, cos, sin, ctx.interleaved), E5M2)
        dnormed = fp8.back(dpacked, ctx.qkv, x)
        norm = x, norm_weight, norm_bias, mean, rstd, eps, rms, plus_one
        dqkv = fp8.gradient(ctx.qkv, dpacked, _normed(fused, norm, saved), x, accumulate=accumulate)
        del dpacked
        grads = norm_gradients(fused, dnormed, dx, x, norm_weight, norm_bias, mean, rstd, plus_one)
        return *grads, dqkv, None, None, None, None, None


class Fp8OutMlpFunction(torch.autograd.Function):
    """Attention's output and the residual -> the block's output."""

    @staticmethod
    def forward(
        ctx: Any,
        mixed: Tensor,
        x: Tensor,
        out: nn.Parameter,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
        up: nn.Parameter,
        down: nn.Parameter,
        fused: FusedOptions,
        norm: tuple[float, bool, bool],
        activation: tuple[str, bool],
    ) -> Tensor:
        fp8, recompute = fused.fp8, fused.recompute
        assert fp8 is not None
        heads = fp8.quantise(mixed, E4M3)
        summed = fp8.forward(heads, out, x, add=x)
        source = norm_source(summed, norm_weight, norm_bias, *norm)
        normed = fp8.make(source, E4M3, transposed=not recompute)
        inner = fp8.forward(normed, up, x)
        active = fp8.make(_activation(inner, activation), E4M3, transposed=not recompute)
        ctx.fused, ctx.norm, ctx.activation, ctx.parameters = fused, norm, activation, (out, up, down)
        operands = (*_saved(normed, recompute=recompute), *_saved(active, recompute=recompute))
        saved = (*present(heads.transposed), *operands)
        ctx.save_for_backward(summed, norm_weight, norm_bias, source.mean, source.rstd, inner, *saved)
        return fp8.forward(active, down, x, add=summed)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        fused, (eps, rms, plus_one), (out, up, down) = ctx.fused, ctx.norm, ctx.parameters
        x, norm_weight, norm_bias, mean, rstd, inner, *saved = ctx.saved_tensors
        fp8, dy, accumulate = fused.fp8, dy.contiguous(), fused.accumulate
        grad = fp8.quantise(dy, E5M2)
        dactive = fp8.back(grad, down, x).flatten(0, 1)
        active = _active(fused, inner, ctx.activation, saved[4:])
        ddown = fp8.gradient(down, grad, active, x, accumulate=accumulate)
        del active
        source = _activation(inner, ctx.activation, dactive)
        grad = fp8.make(source, E5M2)
        del dactive, source
        dnormed = fp8.back(grad, up, x)
        norm = x, norm_weight, norm_bias, mean, rstd, eps, rms, plus_one
        dup = fp8.gradient(up, grad, _normed(fused, norm, saved[2:4]), x, accumulate=accumulate)
        del grad
        dx, dweight, dbias = norm_gradients(fused, dnormed, dy, x, norm_weight, norm_bias, mean, rstd, plus_one)
        grad = fp8.quantise(dx, E5M2)
        dmixed = fp8.back(grad, out, x)
        dout = fp8.gradient(out, grad, ScaledTensor(*saved[:2]), x, accumulate=accumulate)
        return dmixed, dx, dout, dweight, dbias, dup, ddown, None, None, None


def _activation(inner: Tensor, activation: tuple[str, bool], dy: Tensor | None = None) -> Source:
    name, gated = activation
    kind = "activation" if dy is None else "backward"
    return Source(kind=kind, x=inner.flatten(0, -2), dy=dy, activation=name, gated=gated)


def _active(fused: FusedOptions, inner: Tensor, activation: tuple[str, bool], saved: list[Tensor]) -> ScaledTensor:
    """The transposed activations, as saved or recomputed."""
    if not fused.recompute:
        return ScaledTensor(*saved)
    return _recompute(_activation(inner, activation), fused, saved[0])


def _normed(fused: FusedOptions, norm: tuple[Any, ...], saved: list[Tensor]) -> ScaledTensor:
    """The transposed output of the norm, as saved or recomputed."""
    if not fused.recompute:
        return ScaledTensor(*saved)
    x, weight, bias, mean, rstd, eps, rms, plus_one = norm
    source = Source(
        kind="norm",
        x=x.flatten(0, -2),
        weight=weight,
        bias=bias,
        mean=mean,
        rstd=rstd,
        eps=eps,
        rms=rms,
        plus_one=plus_one,
    )
    return _recompute(source, fused, saved[0])


def _recompute(source: Source, fused: FusedOptions, known: Tensor | None) -> ScaledTensor:
    assert fused.fp8 is not None
    return present(fused.fp8.make(source, E4M3, rows=False, known=known).transposed)
