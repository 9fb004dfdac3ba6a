"""Tensor parallelism: heads, MLPs and the vocabulary cut over ranks, with the tokens cut in between where asked.

QKV and up are cut by rows, out and down by columns (Shoeybi et al. 2019), so a sub-layer needs one exchange before and
one after; with sequence parallelism (Korthikanti et al. 2022) these are an all-gather and a reduce-scatter of tokens,
and norms and residuals work on 1/tp of the tokens. Fused rows are grouped by head, so a cut holds whole heads.
"""

from __future__ import annotations

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
from armillary.model.layers.mlp import MLP
from armillary.model.layers.norm import Norm
from armillary.model.moe.experts import MixtureOfExperts
from armillary.model.transformer import Block, Transformer
from armillary.parallel.collectives import Group, all_gather, gather, scatter, share, summed, summed_for_each
from armillary.parallel.expert.shard_experts import cut_routing
from armillary.parallel.local_tensors import COLUMNS, ROWS, SAME, SHARED, become, local, localise
from armillary.parallel.vocabulary import first_row, look_up

# B batch, T tokens, H hidden


def cut_by_tensor(
    model: Transformer, mesh: DeviceMesh, *, cut_tokens: bool, gather_again: Collection[str] = ()
) -> Group:
    """Cut a model (on meta or filled) over the ranks of `mesh`; its hidden states are cut along T with `cut_tokens`.

    The blocks named in `gather_again` keep only their own tokens for the backward pass, which gathers the others once
    more: worth it where activations are kept at all.
    """
    group = Group.of(mesh)
    copied = SHARED if cut_tokens else SAME
    for name, block in model.blocks.items():
        assert isinstance(block, Block)
        _cut_block(block, mesh, _Cutting(group=group, tokens=cut_tokens, again=name in gather_again))
    for norm in _norms(model):
        localise(norm, mesh, {"weight": copied, "bias": copied})
    if model.embedding is not None:
        _cut_embedding(model.embedding, mesh, group, cut_tokens=cut_tokens)
    if model.position_embedding is not None:
        localise(model.position_embedding, mesh, {"weight": copied})
        if cut_tokens:
            model.position_embedding.register_forward_pre_hook(partial(_own_positions, group))
    if model.output is not None:
        localise(model.output, mesh, {"weight": ROWS, "bias": ROWS})
    return group


def _norms(model: Transformer) -> list[Norm]:
    """Those of the residual stream, which work on this rank's tokens."""
    names = ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm")
    found = [getattr(block, name) for block in model.blocks.values() for name in names] + [model.norm]
    return [norm for norm in found if norm is not None]


@dataclass(frozen=True, kw_only=True)
class _Cutting:
    """How the layers of a block are cut."""

    group: Group
    """over whom"""
    tokens: bool
    """between cut layers, tokens are cut too"""
    again: bool
    """the backward pass gathers tokens again rather than keeping them"""


def _cut_block(block: Block, mesh: DeviceMesh, cutting: _Cutting) -> None:
    attention, mlp = block.attention, block.mlp
    _cut_rows(attention.qkv, mesh, cutting)
    _cut_columns(attention.out, mesh, cutting)
    if isinstance(mlp, MLP):
        _cut_rows(mlp.up, mesh, cutting)
        _cut_columns(mlp.down, mesh, cutting)
    else:
        assert isinstance(mlp, MixtureOfExperts)
        cut_routing(mlp, mesh, cutting.group, tokens=cutting.tokens)
    _cut_heads(attention, mesh, cutting.group)


# --- products


def _cut_rows(module: nn.Linear, mesh: DeviceMesh, cutting: _Cutting) -> None:
    """Outputs are cut: every rank reads all tokens and makes its own heads or MLP rows."""
    localise(module, mesh, {"weight": ROWS, "bias": ROWS, "lora_a": SHARED, "lora_b": ROWS})
    module.cutting = cutting  # type: ignore[assignment]
    become(module, _reading_all)


@cache
def _reading_all(kind: type[nn.Module]) -> type[nn.Module]:
    def forward(module: Any, x_BTH: Tensor) -> Tensor:
        x_BTH, cutting = _half(x_BTH), module.cutting
        if not cutting.tokens:
            return kind.forward(module, share(x_BTH, cutting.group))  # type: ignore[no-any-return]
        whole_BTH = gather(x_BTH, cutting.group, dim=1)
        if not cutting.again or torch.compiler.is_compiling():
            return kind.forward(module, whole_BTH)  # type: ignore[no-any-return]
        with gathering_again(x_BTH, whole_BTH, cutting.group):
            return kind.forward(module, whole_BTH)  # type: ignore[no-any-return]

    return type(f"Reading{kind.__name__}", (kind,), {"forward": forward})


def _half(x: Tensor) -> Tensor:
    """What autocast multiplies in a half format travels in it."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def gathering_again(piece_BTH: Tensor, whole_BTH: Tensor, group: Group) -> saved_tensors_hooks:
    """Where autograd would keep the whole, keep the piece, and gather it when the backward pass asks."""
    kept = piece_BTH.detach()
    storage, size = whole_BTH.untyped_storage()._cdata, whole_BTH.numel()

    def pack(tensor: Tensor) -> Tensor | torch.Size:
        same = tensor.untyped_storage()._cdata == storage
        return tensor.shape if same and tensor.numel() == size and tensor.is_contiguous() else tensor

    def unpack(packed: Tensor | torch.Size) -> Tensor:
        return packed if isinstance(packed, Tensor) else all_gather(kept, group, dim=1).view(packed)

    return saved_tensors_hooks(pack, unpack)


def _cut_columns(module: nn.Linear, mesh: DeviceMesh, cutting: _Cutting) -> None:
    """Inputs are cut: products are parts of a sum, to which the bias is added once."""
    copied = SHARED if cutting.tokens else SAME
    cuts = {"weight": COLUMNS, "bias": copied, "lora_a": COLUMNS, "lora_b": SHARED}
    localise(module, mesh, cuts, aside="bias")
    module.cutting = cutting  # type: ignore[assignment]
    become(module, _making_parts)


@cache
def _making_parts(kind: type[nn.Module]) -> type[nn.Module]:
    def forward(module: Any, x_BTF: Tensor) -> Tensor:
        part_BTH, group = kind.forward(module, x_BTF), module.cutting.group
        out_BTH = scatter(part_BTH, group, dim=1) if module.cutting.tokens else summed(part_BTH, group)
        bias = local(module, "bias")
        return out_BTH if bias is None else out_BTH + bias.to(out_BTH.dtype)

    return type(f"Summing{kind.__name__}", (kind,), {"forward": forward})


# --- heads


def _cut_heads(attention: Attention, mesh: DeviceMesh, group: Group) -> None:
    """What belongs to a head goes with it: sinks, slopes, and the norms of queries and keys."""
    localise(attention, mesh, {"sinks_N": ROWS})
    if attention.slopes_N is not None:
        attention.local_heads = _own_part(attention.slopes_N, group)  # type: ignore[assignment]
        become(attention, _with_local_slopes)
    for norm in (attention.q_norm, attention.k_norm):
        if norm is None:
            continue
        cut = ROWS if attention.norm_whole else SHARED
        localise(norm, mesh, {"weight": cut, "bias": cut})
        if attention.norm_whole:
            norm.group = group  # type: ignore[assignment]
            become(norm, _over_ranks)


def _own_part(heads_N: Tensor, group: Group) -> slice:
    size = len(heads_N) // group.size
    return slice(group.rank * size, (group.rank + 1) * size)


@cache
def _with_local_slopes(kind: type[nn.Module]) -> type[nn.Module]:
    """ALiBi slopes stay a whole buffer, which the attention layer makes anew; its code sees those of its heads."""
    seen = property(lambda module: module._buffers["slopes_N"][module.local_heads])
    return type(f"Sloped{kind.__name__}", (kind,), {"slopes_N": seen})


@cache
def _over_ranks(kind: type[nn.Module]) -> type[nn.Module]:
    return type(f"Summed{kind.__name__}", (kind,), {"forward": _norm_over_ranks})


def _norm_over_ranks(norm: Any, x: Tensor) -> Tensor:
    """The norm over all heads of all ranks: means are sums over the ranks divided by the whole size."""
    wide = widen(x)
    if norm.kind == "layer":
        wide = wide - summed_for_each(wide.sum(-1, keepdim=True), norm.group) / norm.size
    mean_square = summed_for_each(wide.pow(2).sum(-1, keepdim=True), norm.group) / norm.size
    normed = wide * torch.rsqrt(mean_square + norm.eps)
    if norm.weight is not None:
        weight = widen(norm.weight)
        normed = normed * (weight + 1.0 if norm.plus_one else weight)
    return (normed if norm.bias is None else normed + widen(norm.bias)).to(x.dtype)


# --- ends


def _cut_embedding(embedding: nn.Embedding, mesh: DeviceMesh, group: Group, *, cut_tokens: bool) -> None:
    localise(embedding, mesh, {"weight": ROWS})
    embedding.looks_up = partial(  # type: ignore[assignment]
        look_up, first=first_row(embedding.num_embeddings, group), group=group, cut_tokens=cut_tokens
    )
    become(embedding, _by_rows)


@cache
def _by_rows(kind: type[nn.Module]) -> type[nn.Module]:
    def forward(module: Any, tokens_BT: Tensor) -> Tensor:
        return module.looks_up(tokens_BT, module.weight)  # type: ignore[no-any-return]

    return type(f"Cut{kind.__name__}", (kind,), {"forward": forward})


def _own_positions(group: Group, module: nn.Module, args: tuple[Tensor, ...]) -> Tensor:
    positions_BT = args[0]
    return positions_BT.chunk(group.size, dim=1)[group.rank]


def refuse_uneven(tokens: int, size: int) -> None:
    """Sequence parallelism cuts tokens evenly."""
    if tokens % size:
        raise BadLayout(f"tp={size} does not cut {tokens} tokens evenly; try --set layout.sequence_parallel=false")
