"""Tensor parallelism: heads, MLPs and the vocabulary are sharded over ranks, and with sequence parallelism the tokens.

QKV and up are sharded by rows, out and down by columns (Shoeybi et al. 2019), so a sub-layer needs one collective
before and one after. With sequence parallelism (Korthikanti et al. 2022) these are an all-gather and a reduce-scatter
of tokens, and norms and residuals work on 1/tp of the tokens. Fused rows are grouped by head: a shard has full heads.
"""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh

from armillary.errors import BadLayout
from armillary.kernels.core.dtype import widen
from armillary.model.layers.attention import Attention
from armillary.model.layers.gated_delta_net import GatedDeltaNet
from armillary.model.layers.latent_attention import LatentAttention
from armillary.model.layers.mlp import MLP
from armillary.model.layers.norm import Norm
from armillary.model.layers.simplicial_attention import SimplicialAttention
from armillary.model.moe.experts import MixtureOfExperts
from armillary.model.transformer import Block, Transformer
from armillary.parallel.collectives import Group, all_gather, gather, scatter, share, summed, summed_for_each
from armillary.parallel.expert.shard_experts import shard_routing
from armillary.parallel.local_tensors import COLUMNS, ROWS, SAME, SHARED, local, localise, swap_class
from armillary.parallel.vocabulary import first_row, look_up

# B batch, T tokens, H hidden


def apply_tensor_parallel(
    model: Transformer, mesh: DeviceMesh, *, shard_tokens: bool, regather: Collection[str] = ()
) -> Group:
    """Shard a model (on meta or filled) over the ranks of `mesh`; `shard_tokens` shards hidden states along T.

    The blocks named in `regather` save only their own tokens for the backward pass, which all-gathers them again:
    worth it where activations are saved at all.
    """
    group = Group.of(mesh)
    copied = SHARED if shard_tokens else SAME
    for name, block in model.blocks.items():
        assert isinstance(block, Block)
        _shard_block(block, mesh, _TensorSharding(group=group, tokens=shard_tokens, regather=name in regather))
    for norm in _norms(model):
        localise(norm, mesh, {"weight": copied, "bias": copied})
    if model.embedding is not None:
        _shard_embedding(model.embedding, mesh, group, shard_tokens=shard_tokens)
    if model.position_embedding is not None:
        localise(model.position_embedding, mesh, {"weight": copied})
        if shard_tokens:
            model.position_embedding.register_forward_pre_hook(partial(_own_positions, group))
    if model.output is not None:
        localise(model.output, mesh, {"weight": ROWS, "bias": ROWS})
    return group


def _norms(model: Transformer) -> list[Norm]:
    """The norms of the residual stream, which work on this rank's tokens."""
    names = ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm")
    norms = [getattr(block, name) for block in model.blocks.values() for name in names] + [model.norm]
    return [norm for norm in norms if norm is not None]


@dataclass(frozen=True, kw_only=True)
class _TensorSharding:
    """How the layers of a block are sharded."""

    group: Group
    tokens: bool  # tokens are sharded between sharded layers
    regather: bool  # the backward pass all-gathers tokens again rather than saving them


def _shard_block(block: Block, mesh: DeviceMesh, sharding: _TensorSharding) -> None:
    attention, mlp = block.attention, block.mlp
    if isinstance(attention, LatentAttention):
        _shard_latent(attention, mesh, sharding)
    elif isinstance(attention, GatedDeltaNet):
        _shard_rows(attention.qkv, mesh, sharding)
        localise(attention, mesh, dict.fromkeys(("conv_CW", "log_rate_V", "rate_bias_V"), ROWS))
        localise(attention.norm, mesh, {"weight": SHARED})
    elif isinstance(attention, SimplicialAttention):
        _shard_rows(attention.qkv, mesh, sharding)
        for norm in (each for each in (attention.q_norm, attention.k_norm) if each is not None):
            localise(norm, mesh, {"weight": SHARED, "bias": SHARED})
    else:
        _shard_rows(attention.qkv, mesh, sharding)
        _shard_heads(attention, mesh, sharding.group)
    _shard_columns(attention.out, mesh, sharding)
    if isinstance(mlp, MLP):
        _shard_rows(mlp.up, mesh, sharding)
        _shard_columns(mlp.down, mesh, sharding)
    else:
        assert isinstance(mlp, MixtureOfExperts)
        shard_routing(mlp, mesh, sharding.group, tokens=sharding.tokens)


# --- linear layers


def _shard_rows(module: nn.Linear, mesh: DeviceMesh, sharding: _TensorSharding) -> None:
    """Column parallel in Megatron's terms: every rank reads all tokens and computes its own heads or MLP rows."""
    localise(module, mesh, {"weight": ROWS, "bias": ROWS, "lora_a": SHARED, "lora_b": ROWS})
    module.sharding = sharding  # type: ignore[assignment]
    swap_class(module, _reading_all)


@cache
def _reading_all(kind: type[nn.Module]) -> type[nn.Module]:
    def forward(module: Any, x_BTH: Tensor) -> Tensor:
        x_BTH, sharding = _half(x_BTH), module.sharding
        if not sharding.tokens:
            return kind.forward(module, share(x_BTH, sharding.group))  # type: ignore[no-any-return]
        full_BTH = gather(x_BTH, sharding.group, dim=1)
        if not sharding.regather or torch.compiler.is_compiling():
            return kind.forward(module, full_BTH)  # type: ignore[no-any-return]
        with regathering(x_BTH, full_BTH, sharding.group):
            return kind.forward(module, full_BTH)  # type: ignore[no-any-return]

    return type(f"Reading{kind.__name__}", (kind,), {"forward": forward})


def _half(x: Tensor) -> Tensor:
    """What autocast multiplies in 16 bits is communicated in 16 bits."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def regathering(shard_BTH: Tensor, full_BTH: Tensor, group: Group) -> saved_tensors_hooks:
    """Where autograd would save the full tensor, save the shard, and all-gather it in the backward pass."""
    saved = shard_BTH.detach()
    storage, size = full_BTH.untyped_storage()._cdata, full_BTH.numel()

    def pack(tensor: Tensor) -> Tensor | torch.Size:
        same = tensor.untyped_storage()._cdata == storage
        return tensor.shape if same and tensor.numel() == size and tensor.is_contiguous() else tensor

    def unpack(packed: Tensor | torch.Size) -> Tensor:
        return packed if isinstance(packed, Tensor) else all_gather(saved, group, dim=1).view(packed)

    return saved_tensors_hooks(pack, unpack)


def _shard_columns(module: nn.Linear, mesh: DeviceMesh, sharding: _TensorSharding) -> None:
    """Row parallel in Megatron's terms: GEMMs give partial sums, to which the bias is added once."""
    copied = SHARED if sharding.tokens else SAME
    specs = {"weight": COLUMNS, "bias": copied, "lora_a": COLUMNS, "lora_b": SHARED}
    localise(module, mesh, specs, hidden="bias")
    module.sharding = sharding  # type: ignore[assignment]
    swap_class(module, _making_parts)


@cache
def _making_parts(kind: type[nn.Module]) -> type[nn.Module]:
    def forward(module: Any, x_BTF: Tensor) -> Tensor:
        part_BTH, group = kind.forward(module, x_BTF), module.sharding.group
        out_BTH = scatter(part_BTH, group, dim=1) if module.sharding.tokens else summed(part_BTH, group)
        bias = local(module, "bias")
        return out_BTH if bias is None else out_BTH + bias.to(out_BTH.dtype)

    return type(f"Summing{kind.__name__}", (kind,), {"forward": forward})


# --- heads


def _shard_heads(attention: Attention, mesh: DeviceMesh, group: Group) -> None:
    """What belongs to a head is sharded with it: sinks, slopes, and the norms of queries and keys."""
    localise(attention, mesh, {"sinks_N": ROWS})
    if attention.slopes_N is not None:
        attention.local_heads = _own_part(attention.slopes_N, group)  # type: ignore[assignment]
        swap_class(attention, _with_local_slopes)
    for norm in (attention.q_norm, attention.k_norm):
        if norm is None:
            continue
        spec = ROWS if attention.norm_whole else SHARED
        localise(norm, mesh, {"weight": spec, "bias": spec})
        if attention.norm_whole:
            norm.group = group  # type: ignore[assignment]
            swap_class(norm, _over_ranks)


def _shard_latent(attention: LatentAttention, mesh: DeviceMesh, sharding: _TensorSharding) -> None:
    """Every rank projects its tokens down to latents, and these up to its own heads."""
    copied = SHARED if sharding.tokens else SAME
    for replicated in (attention.q_down, attention.q_norm, attention.kv_down, attention.kv_norm):
        if replicated is not None:
            localise(replicated, mesh, dict.fromkeys(("weight", "bias", "lora_a", "lora_b"), copied))
    _shard_rows(attention.q, mesh, sharding)
    localise(attention.kv_up, mesh, {"weight": ROWS, "lora_a": SHARED, "lora_b": ROWS})
    attention.sharding = sharding  # type: ignore[assignment]
    swap_class(attention, _with_local_heads)


@cache
def _with_local_heads(kind: type[nn.Module]) -> type[nn.Module]:
    def for_all_heads(module: Any, latent_BTL: Tensor) -> Tensor:
        latent_BTL, sharding = _half(latent_BTL), module.sharding
        return gather(latent_BTL, sharding.group, dim=1) if sharding.tokens else share(latent_BTL, sharding.group)

    return type(f"Sharded{kind.__name__}", (kind,), {"for_all_heads": for_all_heads})


def _own_part(heads_N: Tensor, group: Group) -> slice:
    size = len(heads_N) // group.size
    return slice(group.rank * size, (group.rank + 1) * size)


@cache
def _with_local_slopes(kind: type[nn.Module]) -> type[nn.Module]:
    """ALiBi slopes stay a full buffer, which the attention layer rebuilds; its code reads those of its heads."""
    local_slopes = property(lambda module: module._buffers["slopes_N"][module.local_heads])
    return type(f"Sloped{kind.__name__}", (kind,), {"slopes_N": local_slopes})


@cache
def _over_ranks(kind: type[nn.Module]) -> type[nn.Module]:
    return type(f"Summed{kind.__name__}", (kind,), {"forward": _norm_over_ranks})


def _norm_over_ranks(norm: Any, x: Tensor) -> Tensor:
    """The norm over all heads of all ranks: means are sums over the ranks divided by the full size."""
    wide = widen(x)
    if norm.kind == "layer":
        wide = wide - summed_for_each(wide.sum(-1, keepdim=True), norm.group) / norm.size
    mean_square = summed_for_each(wide.pow(2).sum(-1, keepdim=True), norm.group) / norm.size
    normed = wide * torch.rsqrt(mean_square + norm.eps)
    if norm.weight is not None:
        weight = widen(norm.weight)
        normed = normed * (weight + 1.0 if norm.plus_one else weight)
    return (normed if norm.bias is None else normed + widen(norm.bias)).to(x.dtype)


# --- embedding


def _shard_embedding(embedding: nn.Embedding, mesh: DeviceMesh, group: Group, *, shard_tokens: bool) -> None:
    localise(embedding, mesh, {"weight": ROWS})
    embedding.looks_up = partial(  # type: ignore[assignment]
        look_up, first=first_row(embedding.num_embeddings, group), group=group, shard_tokens=shard_tokens
    )
    swap_class(embedding, _by_rows)


@cache
def _by_rows(kind: type[nn.Module]) -> type[nn.Module]:
    def forward(module: Any, tokens_BT: Tensor) -> Tensor:
        return module.looks_up(tokens_BT, module.weight)  # type: ignore[no-any-return]

    return type(f"Sharded{kind.__name__}", (kind,), {"forward": forward})


def _own_positions(group: Group, module: nn.Module, args: tuple[Tensor, ...]) -> Tensor:
    positions_BT = args[0]
    return positions_BT.chunk(group.size, dim=1)[group.rank]


def refuse_uneven(tokens: int, size: int) -> None:
    """Sequence parallelism needs equal shards."""
    if tokens % size:
        raise BadLayout(f"tp={size} does not divide {tokens} tokens; try --set layout.sequence_parallel=false")
