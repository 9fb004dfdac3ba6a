"""Rows of gated projections, between Hugging Face's order and ours: of gated delta-net layers, and of attention with
output gates.

Ours are grouped per key head or KV head, so that a contiguous shard has whole heads.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from armillary.spec.model import GatedDelta

Pair = tuple[Callable[[Sequence[Tensor]], Tensor], Callable[[Tensor], list[Tensor]]]
"""(join, split), as in `hf_layout.Rule`"""


def gated_qkv_pair(kv_heads: int, dim: int, group: int) -> Pair:
    """Each head's queries are stored with its gate behind them; ours are [q…, k, v, gate…] per KV head."""

    def join(parts: Sequence[Tensor]) -> Tensor:
        queries = parts[0].unflatten(0, (kv_heads, group, 2, dim))
        k, v = (x.unflatten(0, (kv_heads, 1, dim)) for x in parts[1:])
        return torch.cat((queries[:, :, 0], k, v, queries[:, :, 1]), dim=1).flatten(0, 2)

    def split(fused: Tensor) -> list[Tensor]:
        grouped = fused.unflatten(0, (kv_heads, 2 * group + 2, dim))
        queries = torch.stack((grouped[:, :group], grouped[:, group + 2 :]), dim=2)
        return [queries.flatten(0, 3), grouped[:, group].flatten(0, 1), grouped[:, group + 1].flatten(0, 1)]

    return join, split


def inputs_pair(delta: GatedDelta, *, apart: bool) -> Pair:
    """Ours are [q, k, v…, z…, b…, a…] per key head: stored as [q, k, v…, z…] and [b…, a…] per key head, or `apart`, as
    all heads of [q, k, v], of z, of b and of a."""
    heads, values = delta.key_heads, delta.value_heads // delta.key_heads
    key, value = delta.key_dim, values * delta.value_dim
    sizes = [key, key, value, value, values, values]
    stored = [[0, 1, 2], [3], [4], [5]] if apart else [[0, 1, 2, 3], [4, 5]]

    def join(parts: Sequence[Tensor]) -> Tensor:
        pieces: list[Tensor] = []
        for part, kinds in zip(parts, stored, strict=True):
            pieces += _pieces(part, [sizes[kind] for kind in kinds], heads, apart=apart)
        return torch.cat(pieces, dim=1).flatten(0, 1)

    def split(fused: Tensor) -> list[Tensor]:
        pieces = fused.unflatten(0, (heads, -1)).split(sizes, dim=1)
        joined = [[pieces[kind] for kind in kinds] for kinds in stored]
        if apart:
            return [torch.cat([piece.flatten(0, 1) for piece in group]) for group in joined]
        return [torch.cat(group, dim=1).flatten(0, 1) for group in joined]

    return join, split


def _pieces(rows: Tensor, sizes: Sequence[int], heads: int, *, apart: bool) -> list[Tensor]:
    """[heads, size, …] of each size."""
    if not apart:
        return list(rows.unflatten(0, (heads, sum(sizes))).split(list(sizes), dim=1))
    return [piece.unflatten(0, (heads, -1)) for piece in rows.split([heads * size for size in sizes])]


def conv_pair(delta: GatedDelta) -> Pair:
    """Channels are stored as all queries, all keys, all values, [C, 1, W]; ours are [q, k, v…] per key head, [C, W]."""
    heads = delta.key_heads
    sizes = [delta.key_dim, delta.key_dim, delta.value_heads // heads * delta.value_dim]

    def join(parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(_pieces(parts[0].squeeze(1), sizes, heads, apart=True), dim=1).flatten(0, 1)

    def split(conv: Tensor) -> list[Tensor]:
        pieces = conv.unflatten(0, (heads, -1)).split(sizes, dim=1)
        return [torch.cat([piece.flatten(0, 1) for piece in pieces])[:, None]]

    return join, split
