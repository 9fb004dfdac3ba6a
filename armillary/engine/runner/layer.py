"""A layer of the model as the engine runs it: its linear functions and norms as plain tensors, and attention
options."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from armillary.engine.runner.latent_layer import LatentLayer, first_linear, latent_linears, make_latent_layer
from armillary.engine.runner.linear.linear_fn import LinearFn, linear_fn
from armillary.kernels.attention.attention import AttentionOptions
from armillary.kernels.delta.delta_rows import DeltaWeights
from armillary.kernels.paged.qkv_to_cache import QkvOptions
from armillary.model.layers.attention import Attention, split_gate
from armillary.model.layers.gated_delta_net import GatedDeltaNet
from armillary.model.layers.latent_attention import LatentAttention
from armillary.model.layers.mlp import MLP
from armillary.model.layers.norm import Norm
from armillary.model.layers.simplicial_attention import SimplicialAttention
from armillary.model.moe.experts import MixtureOfExperts
from armillary.model.transformer import Block
from armillary.spec.model import ModelConfig


def linears_of(block: Any) -> list[nn.Linear]:
    """The linear layers of a model's block, but for routers and experts."""
    mlp = [block.mlp.up, block.mlp.down] if isinstance(block.mlp, MLP) else []
    if isinstance(block.attention, LatentAttention):
        return [*latent_linears(block.attention), *mlp]
    return [block.attention.qkv, block.attention.out, *mlp]


def free_weights(*linears: nn.Linear) -> None:
    """Free weights that the engine holds in another form; packed ones are held as they are."""
    for linear in (each for each in linears if isinstance(each, nn.Linear)):
        linear.weight = nn.Parameter(linear.weight.new_empty(0), requires_grad=False)


@dataclass(kw_only=True)
class Layer:
    """One layer. Linear functions may be replaced before the first step: sharded over ranks, or quantized."""

    number: int
    group: int
    slot: int  # index among the layers of that group
    sliding: bool  # which RoPE table
    rotates: bool
    scales_queries: bool  # by a factor of their position
    qkv: LinearFn  # with latent attention: queries (or their latent) and the KV latent
    out: LinearFn
    up: LinearFn | None  # none: `mixture` computes the MLP
    down: LinearFn | None
    mixture: MixtureOfExperts | None
    activation: str
    gated: bool
    norms: dict[str, Norm | None]  # attention_norm, attention_post_norm, mlp_norm, mlp_post_norm
    parallel: bool
    scale: float  # factor of what is added to the residual
    heads: QkvOptions
    options: AttentionOptions
    latent: LatentLayer | None = None
    delta: DeltaWeights | None = None  # of a gated delta-net layer; `slot` is its index among these
    simplicial: SimplicialAttention | None = None  # of a 2-simplicial layer: how its projection is divided into heads
    gates: bool = False  # the rows of `qkv` end with gates of the heads' outputs


def make_layer(block: Block, group: int, slot: int, number: int = 0) -> Layer:
    attention, mlp = block.attention, block.mlp
    is_dense = isinstance(mlp, MLP)
    names = ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm")
    return Layer(
        number=number,
        group=group,
        slot=slot,
        sliding=attention.sliding,
        rotates=attention.rotates,
        scales_queries=attention.scales_queries,
        qkv=first_linear(attention) if isinstance(attention, LatentAttention) else linear_fn(attention.qkv),
        out=linear_fn(attention.out),
        up=linear_fn(mlp.up) if is_dense else None,
        down=linear_fn(mlp.down) if is_dense else None,
        mixture=None if is_dense else mlp,
        activation=mlp.activation if is_dense else "",
        gated=mlp.gated if is_dense else True,
        norms={name: getattr(block, name) for name in names},
        parallel=block.parallel,
        scale=block.residual_scale,
        heads=_head_options(attention) if isinstance(attention, Attention) else QkvOptions(),
        delta=_delta_weights(attention) if isinstance(attention, GatedDeltaNet) else None,
        gates=isinstance(attention, Attention) and attention.has_gate,
        simplicial=attention if isinstance(attention, SimplicialAttention) else None,
        options=attention.options(),
        latent=make_latent_layer(attention) if isinstance(attention, LatentAttention) else None,
    )


def replace_linear_fns(layer: Layer, replaced: Callable[[LinearFn], LinearFn]) -> None:
    """Replace the linear functions of a layer, but for routers and experts."""
    layer.qkv, layer.out = replaced(layer.qkv), replaced(layer.out)
    if layer.latent is not None and layer.latent.q is not None:
        layer.latent.q = replaced(layer.latent.q)
    if layer.up is not None and layer.down is not None:
        layer.up, layer.down = replaced(layer.up), replaced(layer.down)


def _delta_weights(attention: GatedDeltaNet) -> DeltaWeights:
    assert attention.norm.weight is not None
    return DeltaWeights(
        conv_CW=attention.conv_CW.detach(),
        log_rate_V=attention.log_rate_V.detach(),
        rate_bias_V=attention.rate_bias_V.detach(),
        norm_E=attention.norm.weight.detach(),
        eps=attention.norm.eps,
        heads=attention.heads,
    )


def _head_options(attention: Attention) -> QkvOptions:
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


def without_gates(layer: Layer, qkv: Tensor, head_dim: int, group: int) -> tuple[Tensor, Tensor | None]:
    """(queries, keys and values [T, R], gates of the heads' outputs)."""
    if not layer.gates:
        return qkv, None
    qkv, gates = split_gate(qkv, group, head_dim)
    return qkv.contiguous(), gates


# T tokens, M numbers of this rank's heads

IntoCache = Callable[..., Any]  # `armillary.kernels.paged.qkv_to_cache.qkv_cache`, or a faster one


def full_qk_norm(
    run: IntoCache,
    config: ModelConfig,
    *,
    rank: int = 0,
    size: int = 1,
    add: Callable[[Tensor], Tensor] = lambda squares: squares,
) -> IntoCache:
    """`run` with the norm before it, for the heads of `rank` of `size`; `add` all-reduces the sums of squares."""
    local, kv_heads, dim = config.heads // size, max(1, config.kv_heads // size), config.head_dim
    copies = max(1, size // config.kv_heads)

    def normed(x_TM: Tensor, weight: Tensor, first: int, total: int, repeats: int, eps: float) -> Tensor:
        wide = x_TM.float()
        squares = add(wide.square().sum(-1, keepdim=True)) / repeats
        local_weight = weight[first : first + x_TM.shape[1]].float()
        return (wide * torch.rsqrt(squares / total + eps) * local_weight).to(x_TM.dtype)

    def into_cache(qkv: Tensor, cache: Tensor, slots: Tensor, cos: Any, sin: Any, options: QkvOptions) -> Any:
        assert options.q_weight is not None and options.k_weight is not None and not options.plus_one
        grouped = qkv.unflatten(-1, (kv_heads, -1, dim))
        q, k, v = grouped[:, :, :-2].flatten(1), grouped[:, :, -2].flatten(1), grouped[:, :, -1:]
        q = normed(q, options.q_weight, rank * local * dim, config.heads * dim, 1, options.eps)
        first = rank * config.kv_heads // size * dim
        k = normed(k, options.k_weight, first, config.kv_heads * dim, copies, options.eps)
        queries, keys = q.unflatten(-1, (kv_heads, -1, dim)), k.unflatten(-1, (kv_heads, 1, dim))
        packed = torch.cat((queries, keys, v), dim=2).flatten(1)
        return run(packed, cache, slots, cos, sin, replace(options, norm="none", q_weight=None, k_weight=None))

    return into_cache
