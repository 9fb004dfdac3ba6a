"""The attention layer: fused QKV, optional QK norm and rotary positions, then the `attend` function, then the output.

Rows of the fused weight are grouped per KV head as [q…, k, v], so a contiguous shard of the output dim holds whole
heads; where the model gates its heads' outputs, the gates' rows follow: [q…, k, v, gate…].
"""

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn

from armillary.kernels.attention.attention import AttentionOptions
from armillary.kernels.pointwise.rope import rotate
from armillary.model.layers.attention_forms import Attend, alibi_slopes
from armillary.model.layers.norm import Norm
from armillary.model.layers.rope import CosSin
from armillary.spec.model import LayerKind, ModelConfig


class Attention(nn.Module):
    """Multi-head, grouped-query or multi-query attention of one layer."""

    slopes_N: Tensor | None

    def __init__(self, config: ModelConfig, kind: LayerKind) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.group = config.heads // config.kv_heads
        self.sliding = kind.attention == "sliding"
        self.window = config.window if self.sliding else None
        self.chunk = config.window if kind.attention == "chunked" else None
        self.rotates = config.positions == "rope" and kind.rope
        self.scales_queries = config.positions == "rope" and not kind.rope and config.query_temperature != 0.0
        self.interleaved = config.rope.interleaved
        self.scale, self.softcap, self.clip = config.scale, config.attention_softcap, config.qkv_clip
        self.has_gate = config.attention_gate
        rows = (config.heads * (1 + config.attention_gate) + 2 * config.kv_heads) * config.head_dim
        self.qkv = nn.Linear(config.hidden, rows, bias=config.qkv_bias)
        self.out = nn.Linear(config.heads * config.head_dim, config.hidden, bias=config.out_bias)
        self.q_norm, self.k_norm = qk_norms(config, kind)
        self.norm_whole = config.qk_norm == "all"
        self.sinks_N = nn.Parameter(torch.empty(config.heads)) if config.sinks else None
        self.alibi = (config.heads, config.alibi_max) if config.positions == "alibi" else None
        self.chosen: Callable[..., tuple[Tensor, Tensor, Tensor]] | None = None
        self.kv_range_2K: Tensor | None = None
        """largest key and value by KV head, of checkpoints with scales for an 8-bit cache"""
        self.register_buffer("slopes_N", alibi_slopes(*self.alibi) if self.alibi else None, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        if self.alibi:  # recomputed in fp32: neither a cast nor an empty copy may touch it
            self.slopes_N = alibi_slopes(*self.alibi).to(self.qkv.weight.device)
        return self

    def forward(self, x_BTH: Tensor, cos_sin: CosSin | None, attend: Attend, layer: int) -> Tensor:
        qkv, gate = self.without_gate(self.qkv(x_BTH))
        q, k, v = self._heads(qkv, None if cos_sin is None else cos_sin[self.sliding])
        if self.scales_queries:
            assert cos_sin is not None
            q = (q * cos_sin[None][0]).to(q.dtype)
        mixed_BTND = attend(layer, q, k, v, self.options())
        mixed = mixed_BTND.flatten(2)
        return self.out(mixed if gate is None else mixed * torch.sigmoid(gate))

    def without_gate(self, fused: Tensor) -> tuple[Tensor, Tensor | None]:
        """(queries, keys and values [..., R], gates of the heads' outputs [..., N·D])."""
        return split_gate(fused, self.group, self.head_dim) if self.has_gate else (fused, None)

    def _heads(self, qkv: Tensor, cos_sin: tuple[Tensor, ...] | None) -> tuple[Tensor, Tensor, Tensor]:
        """Normalised and rotated queries and keys, and values; rotated by one kernel where one was chosen."""
        if self.rotates and self.chosen is not None:
            assert cos_sin is not None
            as_it_is = self.q_norm is None and self.clip is None
            packed = qkv if as_it_is else self._packed(*self._apart(qkv))
            return self.chosen(packed, *cos_sin, self.group, self.head_dim, self.interleaved)
        q, k, v = self._apart(qkv)
        if self.rotates:
            assert cos_sin is not None
            q, k = (rotate(x, *cos_sin, interleaved=self.interleaved) for x in (q, k))
        return q, k, v

    def _apart(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.split(qkv)
        return self._normed(q, self.q_norm), self._normed(k, self.k_norm), v

    def _packed(self, q_BTND: Tensor, k_BTKD: Tensor, v_BTKD: Tensor) -> Tensor:
        """Heads in the order of the fused projection."""
        grouped = (q_BTND.unflatten(2, (-1, self.group)), k_BTKD[:, :, :, None], v_BTKD[:, :, :, None])
        return torch.cat(grouped, dim=3).flatten(2)

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [B,T,N,D], k [B,T,K,D], v [B,T,K,D] of the fused projection."""
        if self.clip is not None:
            qkv = qkv.clamp(-self.clip, self.clip)
        grouped = qkv.unflatten(-1, (-1, self.group + 2, self.head_dim))
        return grouped[..., : self.group, :].flatten(2, 3), grouped[..., self.group, :], grouped[..., self.group + 1, :]

    def _normed(self, x_BTND: Tensor, norm: Norm | None) -> Tensor:
        if norm is None:
            return x_BTND
        if torch.is_grad_enabled():  # a view would keep the full projection for the backward pass
            x_BTND = x_BTND.contiguous()
        return norm(x_BTND.flatten(2)).view_as(x_BTND) if self.norm_whole else norm(x_BTND)

    def options(self) -> AttentionOptions:
        """What this layer asks of attention; documents and masks are the batch's."""
        return AttentionOptions(
            scale=self.scale,
            window=self.window or 0,
            chunk=self.chunk or 0,
            softcap=self.softcap or 0.0,
            sinks_N=self.sinks_N,
            slopes_N=self.slopes_N,
        )


def split_gate(fused: Tensor, group: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Rows of [q…, k, v, gate…] per KV head, apart: ([q…, k, v] per KV head, the gates)."""
    grouped = fused.unflatten(-1, (-1, 2 * group + 2, head_dim))
    return grouped[..., : group + 2, :].flatten(-3), grouped[..., group + 2 :, :].flatten(-3)


def qk_norms(config: ModelConfig, kind: LayerKind) -> tuple[Norm | None, Norm | None]:
    """The norms of queries and of keys, where the model has them."""
    if config.qk_norm == "none" or (config.qk_norm_kind == "plain" and not kind.rope):
        return None, None
    all_heads = config.qk_norm == "all"
    sizes = [heads * config.head_dim if all_heads else config.head_dim for heads in (config.heads, config.kv_heads)]
    q_norm, k_norm = (
        Norm(
            size,
            kind=config.norm,
            eps=config.norm_eps,
            weight=config.qk_norm_kind == "weight",
            plus_one=config.norm_plus_one,
        )
        for size in sizes
    )
    return q_norm, k_norm
