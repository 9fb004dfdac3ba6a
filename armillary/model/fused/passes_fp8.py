"""The two passes of a block around attention with fp8 products: every operand is made in fp8 by what computes it.

As in fused.py, but nothing that is only multiplied is ever written in bf16: norms, activations and their gradients are
cast on the way, both ways round, and the backward pass keeps the transposed fp8 form of what it needs, half the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from armillary.kernels.fp8.gemm import Fp8Gemm
from armillary.kernels.fp8.linear import E4M3, E5M2
from armillary.kernels.fp8.operands import Operand, ScaledTensor, Source, make_operand, norm_source
from armillary.model.low_precision.fp8_linear import Fp8Weights

if TYPE_CHECKING:
    from armillary.model.fused.passes import FusedOptions

# M tokens (batch and time flattened), H hidden


@dataclass(frozen=True, kw_only=True)
class Fp8Gemms:
    """How fp8 products are made; one for all blocks."""

    scaling: str
    """'tensor' or 'row'"""
    weights: Fp8Weights
    """the weights' operands"""
    multiply: Fp8Gemm = field(default_factory=Fp8Gemm)
    """what multiplies"""

    def forward(self, x: Operand, parameter: nn.Parameter, like: Tensor, *, add: Tensor | None = None) -> Tensor:
        """x·weightᵀ [B, T, ·] in the format of `like`, plus `add`."""
        added = None if add is None else add.contiguous().flatten(0, -2)
        made = self.multiply(_there(x.rows), self.weights.rows(parameter), like.dtype, fast=True, add=added)
        return made.view(*like.shape[:-1], -1)

    def back(self, dy: Operand, parameter: nn.Parameter, like: Tensor) -> Tensor:
        """dy·weight [B, T, ·]."""
        made = self.multiply(_there(dy.rows), self.weights.transposed(parameter), like.dtype, fast=False)
        return made.view(*like.shape[:-1], -1)

    def gradient(
        self, fused: FusedOptions, parameter: nn.Parameter, dy: Operand, x: ScaledTensor, like: Tensor
    ) -> Tensor | None:
        """dyᵀ·x, returned, or added into the parameter's .grad."""
        if not parameter.requires_grad:
            return None
        if not fused.accumulate:
            return self.multiply(_there(dy.transposed), x, like.dtype, fast=False)
        first = parameter.grad is None
        if first:
            parameter.grad = torch.empty_like(parameter)
        total = parameter.grad
        assert total is not None
        with torch.no_grad():
            self.multiply(_there(dy.transposed), x, total.dtype, fast=False, add=None if first else total, out=total)
        return None

    def of(self, x: Tensor, dtype: torch.dtype) -> Operand:
        """Numbers as they are."""
        return self.make(Source(x=x.flatten(0, -2)), dtype)

    def make(self, source: Source, dtype: torch.dtype, **how: Any) -> Operand:
        """What `source` gives, as `make_operand` has it."""
        return make_operand(source, dtype, self.scaling, **how)


def _there(scaled: ScaledTensor | None) -> ScaledTensor:
    assert scaled is not None
    return scaled


def _kept(operand: Operand, *, recompute: bool) -> tuple[Tensor | None, Tensor | None]:
    """For the backward pass: the transposed operand, or what is known to make it again with."""
    return (operand.known, None) if recompute else _there(operand.transposed)


class Fp8QkvFunction(torch.autograd.Function):
    """x -> q, k, v and x again, so that the residual's gradient comes back through here."""

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
        ctx.save_for_backward(x, norm_weight, norm_bias, *stats, cos, sin, *_kept(normed, recompute=recompute))
        return q, k, v, x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor, dx: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        ops, fused, (eps, rms, plus_one) = torch.ops.armillary, ctx.fused, ctx.norm
        x, norm_weight, norm_bias, mean, rstd, cos, sin, *kept = ctx.saved_tensors
        fp8 = fused.fp8
        dpacked = fp8.of(ops.rope_backward(dq, dk, dv, cos, sin, ctx.interleaved), E5M2)
        dnormed = fp8.back(dpacked, ctx.qkv, x)
        norm = x, norm_weight, norm_bias, mean, rstd, eps, rms, plus_one
        dqkv = fp8.gradient(fused, ctx.qkv, dpacked, _recompute_normed(fused, norm, kept), x)
        del dpacked
        dx, dweight, dbias = ops.norm_backward(
            dnormed, dx, x, norm_weight, mean, rstd, plus_one, norm_bias is not None, fused.norm_pairs
        )
        return dx, _or_none(dweight, norm_weight), _or_none(dbias, norm_bias), dqkv, None, None, None, None, None


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
        heads = fp8.of(mixed, E4M3)
        summed = fp8.forward(heads, out, x, add=x)
        source = norm_source(summed, norm_weight, norm_bias, *norm)
        normed = fp8.make(source, E4M3, transposed=not recompute)
        inner = fp8.forward(normed, up, x)
        active = fp8.make(_activated(inner, activation), E4M3, transposed=not recompute)
        ctx.fused, ctx.norm, ctx.activation, ctx.parameters = fused, norm, activation, (out, up, down)
        kept = (*_there(heads.transposed), *_kept(normed, recompute=recompute), *_kept(active, recompute=recompute))
        ctx.save_for_backward(summed, norm_weight, norm_bias, source.mean, source.rstd, inner, *kept)
        return fp8.forward(active, down, x, add=summed)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        fused, (eps, rms, plus_one), (out, up, down) = ctx.fused, ctx.norm, ctx.parameters
        x, norm_weight, norm_bias, mean, rstd, inner, *kept = ctx.saved_tensors
        fp8, dy = fused.fp8, dy.contiguous()
        transposed = fp8.of(dy, E5M2)
        dactive = fp8.back(transposed, down, x).flatten(0, 1)
        ddown = fp8.gradient(fused, down, transposed, _recompute_active(fused, inner, ctx.activation, kept[4:]), x)
        source = _activated(inner, ctx.activation, dactive)
        transposed = fp8.make(source, E5M2)
        del dactive, source
        dnormed = fp8.back(transposed, up, x)
        norm = x, norm_weight, norm_bias, mean, rstd, eps, rms, plus_one
        dup = fp8.gradient(fused, up, transposed, _recompute_normed(fused, norm, kept[2:4]), x)
        del transposed
        dx, dweight, dbias = torch.ops.armillary.norm_backward(
            dnormed, dy, x, norm_weight, mean, rstd, plus_one, norm_bias is not None, fused.norm_pairs
        )
        transposed = fp8.of(dx, E5M2)
        dmixed = fp8.back(transposed, out, x)
        dout = fp8.gradient(fused, out, transposed, ScaledTensor(*kept[:2]), x)
        dweight, dbias = _or_none(dweight, norm_weight), _or_none(dbias, norm_bias)
        return dmixed, dx, dout, dweight, dbias, dup, ddown, None, None, None


def _activated(inner: Tensor, activation: tuple[str, bool], dy: Tensor | None = None) -> Source:
    name, gated = activation
    kind = "activation" if dy is None else "backward"
    return Source(kind=kind, x=inner.flatten(0, -2), dy=dy, activation=name, gated=gated)


def _recompute_active(
    fused: FusedOptions, inner: Tensor, activation: tuple[str, bool], kept: list[Tensor]
) -> ScaledTensor:
    if not fused.recompute:
        return ScaledTensor(*kept)
    return _recompute_transposed(_activated(inner, activation), fused, kept[0])


def _recompute_normed(fused: FusedOptions, norm: tuple[Any, ...], kept: list[Tensor]) -> ScaledTensor:
    if not fused.recompute:
        return ScaledTensor(*kept)
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
    return _recompute_transposed(source, fused, kept[0])


def _recompute_transposed(source: Source, fused: FusedOptions, known: Tensor | None) -> ScaledTensor:
    assert fused.fp8 is not None
    return _there(fused.fp8.make(source, E4M3, rows=False, known=known).transposed)


def _or_none(gradient: Tensor, parameter: Tensor | None) -> Tensor | None:
    return gradient if parameter is not None and parameter.requires_grad else None
