"""Rows of fused projections, between Hugging Face's order and ours: queries, keys and values; gates and ups; stacked
experts."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from armillary.model.weights.gated_rows import gated_qkv_pair
from armillary.spec.model import ModelConfig

Join = Callable[[Sequence[Tensor]], Tensor]
Split = Callable[[Tensor], list[Tensor]]


# --- queries, keys and values: grouped per KV head as [q…, k, v]


def qkv_pair(config: ModelConfig, *, stacked: bool) -> tuple[Join, Split]:
    kv_heads, dim, group = config.kv_heads, config.head_dim, config.heads // config.kv_heads
    sizes = [config.heads * dim, kv_heads * dim, kv_heads * dim]
    if config.attention_gate:
        return gated_qkv_pair(kv_heads, dim, group)

    def join(parts: Sequence[Tensor]) -> Tensor:
        q, k, v = parts[0].split(sizes) if stacked else parts
        grouped = [x.unflatten(0, (kv_heads, count, dim)) for x, count in ((q, group), (k, 1), (v, 1))]
        return torch.cat(grouped, dim=1).flatten(0, 2)

    def split(fused: Tensor) -> list[Tensor]:
        grouped = fused.unflatten(0, (kv_heads, group + 2, dim))
        parts = [grouped[:, :group].flatten(0, 2), grouped[:, group].flatten(0, 1), grouped[:, group + 1].flatten(0, 1)]
        return [torch.cat(parts)] if stacked else parts

    return join, split


def grouped_pair(config: ModelConfig) -> tuple[Join, Split]:
    """Queries and several keys and values, each a tensor of its own: [q…, k1, k2, v1, v2] per KV head."""
    kv_heads, dim, group = config.kv_heads, config.head_dim, config.heads // config.kv_heads

    def join(parts: Sequence[Tensor]) -> Tensor:
        return torch.cat([x.unflatten(0, (kv_heads, -1, dim)) for x in parts], dim=1).flatten(0, 2)

    def split(fused: Tensor) -> list[Tensor]:
        grouped = fused.unflatten(0, (kv_heads, -1, dim)).split([group, 1, 1, 1, 1], dim=1)
        return [part.flatten(0, 2) for part in grouped]

    return join, split


# --- gate and up: rows alternate


def interleave(gate: Tensor, up: Tensor) -> Tensor:
    return torch.stack((gate, up), dim=1).flatten(0, 1)


def gate_up_pair(*, stacked: bool) -> tuple[Join, Split]:
    def join(parts: Sequence[Tensor]) -> Tensor:
        gate, up = parts[0].chunk(2) if stacked else parts
        return interleave(gate, up)

    def split(fused: Tensor) -> list[Tensor]:
        gate, up = fused[0::2], fused[1::2]
        return [torch.cat((gate, up))] if stacked else [gate, up]

    return join, split


def join_gate_ups(parts: Sequence[Tensor]) -> Tensor:
    return torch.stack([interleave(gate, up) for gate, up in zip(parts[0::2], parts[1::2], strict=True)])


def split_gate_ups(fused: Tensor) -> list[Tensor]:
    return [half for expert in fused.unbind(0) for half in (expert[0::2], expert[1::2])]


# --- stacked experts, stored [E, inputs, outputs]


def transposed(parts: Sequence[Tensor]) -> Tensor:
    return parts[0].transpose(1, 2)


def transposed_back(stacked: Tensor) -> list[Tensor]:
    return [stacked.transpose(1, 2)]


def join_stacked(parts: Sequence[Tensor]) -> Tensor:
    gate, up = parts[0].transpose(1, 2).chunk(2, dim=1)
    return torch.stack((gate, up), dim=2).flatten(1, 2)


def split_stacked(stacked: Tensor) -> list[Tensor]:
    return [torch.cat((stacked[:, 0::2], stacked[:, 1::2]), dim=1).transpose(1, 2)]
