"""A layer of the model as the engine runs it: its products and norms as plain tensors, and how attention is called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from armillary.kernels.attention.attention import AttentionOptions
from armillary.kernels.paged.qkv_to_cache import QkvOptions
from armillary.model.layers.mlp import MLP
from armillary.model.layers.norm import Norm
from armillary.model.transformer import Block

Product = Callable[[Tensor], Tensor]


class Dense:
    """x @ weightᵀ + bias."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


def dense(linear: nn.Linear) -> Dense:
    return Dense(linear.weight, linear.bias)


@dataclass(kw_only=True)
class Layer:
    """One layer. Products may be exchanged before the first step: cut over ranks, or in fewer bits."""

    group: int
    """which block table"""
    slot: int
    """its place among the layers of that table"""
    sliding: bool
    """which rotary table"""
    rotates: bool
    """whether queries and keys turn at all"""
    qkv: Product
    out: Product
    up: Product | None
    """none: `mixture` does the MLP"""
    down: Product | None
    mixture: nn.Module | None
    activation: str
    gated: bool
    norms: dict[str, Norm | None]
    """attention_norm, attention_post_norm, mlp_norm, mlp_post_norm"""
    parallel: bool
    scale: float
    """of what is added to the residual"""
    heads: QkvOptions
    options: AttentionOptions


def make_layer(block: Block, group: int, slot: int) -> Layer:
    """From the model's own block."""
    attention, mlp = block.attention, block.mlp
    is_dense = isinstance(mlp, MLP)
    names = ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm")
    return Layer(
        group=group,
        slot=slot,
        sliding=attention.sliding,
        rotates=attention.rotates,
        qkv=dense(attention.qkv),
        out=dense(attention.out),
        up=dense(mlp.up) if is_dense else None,
        down=dense(mlp.down) if is_dense else None,
        mixture=None if is_dense else mlp,
        activation=mlp.activation if is_dense else "",
        gated=mlp.gated if is_dense else True,
        norms={name: getattr(block, name) for name in names},
        parallel=block.parallel,
        scale=block.residual_scale,
        heads=_head_options(block),
        options=attention.options(),
    )


def _head_options(block: Block) -> QkvOptions:
    attention = block.attention
    norm, other = attention.q_norm, attention.k_norm
    if norm is None or other is None:
        return QkvOptions(clip=attention.clip, interleaved=attention.interleaved)
    return QkvOptions(
        clip=attention.clip,
        norm=norm.kind,
        q_weight=norm.weight,
        k_weight=other.weight,
        eps=norm.eps,
        plus_one=norm.plus_one,
        interleaved=attention.interleaved,
    )
