"""Ring attention (Liu et al., arXiv 2310.01889): each rank keeps the queries of its tokens while keys and values pass
from rank to rank, so no rank ever holds those of the full row.

A row is split into 2·cp pieces, and rank r holds pieces r and 2·cp - 1 - r (zig-zag), so that every rank has equally
many visible keys at every iteration. Forward and backward are one operator each for compilers and selective recompute.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from armillary.kernels.core.dtype import widen
from armillary.parallel.context.ring_attention_block import (
    BlockPosition,
    FullSoftmax,
    Options,
    backward,
    forward,
    merge,
)

# B batch, T this rank's tokens, W all tokens of the row, N query heads, K KV heads, D head dim

_SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor? documents, Tensor? sinks, Tensor? slopes, float scale, int window, "
    "float softcap, str group, int[] block_mask"
)
NONE, SOME, ALL = range(3)
"""mask of two pieces of packed rows: no document is in both, some are, or both are of one document"""


def pieces(rank: int, size: int) -> tuple[int, int]:
    """The two of 2·size pieces of a row that a rank holds, in order."""
    return rank, 2 * size - 1 - rank


def make_block_mask(documents_BW: Tensor, size: int) -> list[int]:
    """NONE, SOME or ALL for every pair of the 2·size pieces: NONE is not computed, and ALL needs no mask. A piece of
    several documents counts as all documents between its first and last."""
    split = documents_BW.unflatten(1, (2 * size, -1))
    low, high = split.amin(dim=2), split.amax(dim=2)
    apart = ((high[:, :, None] < low[:, None]) | (low[:, :, None] > high[:, None])).all(dim=0)
    same = ((low == high)[:, :, None] & (low == high)[:, None] & (low[:, :, None] == low[:, None])).all(dim=0)
    mask: list[int] = torch.where(apart, NONE, torch.where(same, ALL, SOME)).flatten().tolist()
    return mask


def visible_pairs(rank: int, source: int, size: int) -> Iterator[tuple[int, int]]:
    """(piece of this rank's two, piece of the source's two) where a query may see a key: three on the diagonal, of
    which two are causal, and two everywhere else."""
    for query, q_piece in enumerate(pieces(rank, size)):
        for key, k_piece in enumerate(pieces(source, size)):
            if k_piece <= q_piece:
                yield query, key


@torch.library.custom_op("armillary::ring_attention", mutates_args=(), schema=f"({_SCHEMA}) -> (Tensor, Tensor)")
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    sinks: Tensor | None,
    slopes: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
    group: str,
    block_mask: list[int],
) -> tuple[Tensor, Tensor]:
    """(output [B, T, N, value dim], log Σ exp [B, N, T]) of this rank's queries over the keys of all ranks; `documents`
    [B, W] are those of full rows, `block_mask` is that of all pairs of pieces (empty: not known)."""
    ring, options = _Ring(group), Options(scale=scale, window=window, softcap=softcap, slopes_N=slopes)
    wide = torch.promote_types(q.dtype, torch.float32)
    out = q.new_zeros((*q.shape[:3], v.shape[-1]), dtype=wide)
    lse = out.new_full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf)
    for source, both in ring.round(_packed(k, v)):
        keys, values = _apart(both, k, v)
        for query, key, place in _places(ring, source, q.shape[1], documents, block_mask):
            if place.is_visible(keys.shape[1] // 2, window):
                more = forward(q[:, query], keys[:, key], values[:, key], options, place)
                out[:, query], lse[:, :, query] = merge(out[:, query], lse[:, :, query], *more)
    if sinks is not None:
        with_sinks = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
        out = out * torch.exp(lse - with_sinks).transpose(1, 2)[..., None]
        lse = with_sinks
    return out.to(q.dtype), lse


@ring_attention.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    sinks: Tensor | None,
    slopes: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
    group: str,
    block_mask: list[int],
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty((*q.shape[:3], v.shape[-1])), q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=wide)


@torch.library.custom_op(
    "armillary::ring_attention_backward",
    mutates_args=(),
    schema=f"(Tensor grad, Tensor out, Tensor lse, {_SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _ring_backward(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    sinks: Tensor | None,
    slopes: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
    group: str,
    block_mask: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dQ, dK, dV, this rank's part of the gradient of the sinks or empty); gradients of keys and values pass from
    rank to rank behind them, and are back after the last iteration."""
    ring, options = _Ring(group), Options(scale=scale, window=window, softcap=softcap, slopes_N=slopes)
    softmax = FullSoftmax.of(grad, widen(out), lse)
    dq = torch.zeros_like(widen(q), memory_format=torch.contiguous_format)
    sums: Tensor | None = None
    for source, both in ring.round(_packed(k, v)):
        keys, values = _apart(both, k, v)
        added = torch.zeros_like(widen(both))
        added_keys, added_values = _apart(added, k, v)
        for query, key, place in _places(ring, source, q.shape[1], documents, block_mask):
            if place.is_visible(keys.shape[1] // 2, window):
                grads = backward(softmax.queries(query), q[:, query], keys[:, key], values[:, key], options, place)
                dq[:, query] += grads[0]
                added_keys[:, key] += grads[1]
                added_values[:, key] += grads[2]
        sums = added if sums is None else ring.rotate(sums) + added
    assert sums is not None
    dk, dv = _apart((ring.rotate(sums) if ring.size > 1 else sums).to(k.dtype), k, v)
    if sinks is None:
        return dq.to(q.dtype), dk.clone(), dv.clone(), q.new_empty(0)
    weights_BNT = torch.exp(sinks.to(lse.dtype)[:, None] - lse)
    return dq.to(q.dtype), dk.clone(), dv.clone(), -(weights_BNT * softmax.delta_BNT).sum((0, 2)).to(sinks.dtype)


@_ring_backward.register_fake
def _(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    sinks: Tensor | None,
    slopes: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
    group: str,
    block_mask: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dsinks = q.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale, ctx.window, ctx.softcap, ctx.group, ctx.block_mask = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors, *output)


def _gradients(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    q, k, v, documents, sinks, slopes, out, lse = ctx.saved_tensors
    settings = (ctx.scale, ctx.window, ctx.softcap, ctx.group, ctx.block_mask)
    dq, dk, dv, dsinks = _ring_backward(grad, out, lse, q, k, v, documents, sinks, slopes, *settings)
    return dq, dk, dv, None, None if sinks is None else dsinks, None, *(None,) * 5


ring_attention.register_autograd(_gradients, setup_context=_keep)


def _packed(k: Tensor, v: Tensor) -> Tensor:
    """Keys and values in one buffer, to be sent together; their head dims may differ."""
    return torch.cat((k.flatten(), v.flatten()))


def _apart(both: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """What is in a buffer like `_packed(k, v)`."""
    keys, values = both.split([k.numel(), v.numel()])
    return keys.view(k.shape), values.view(v.shape)


def _places(
    ring: _Ring, source: int, num_tokens: int, documents_BW: Tensor | None, block_mask: list[int]
) -> Iterator[tuple[slice, slice, BlockPosition]]:
    """(this rank's tokens, the source's tokens, their positions) of every pair of pieces that is not masked out."""
    size = num_tokens // 2
    for query, key in visible_pairs(ring.rank, source, ring.size):
        at, other = pieces(ring.rank, ring.size)[query], pieces(source, ring.size)[key]
        how = block_mask[at * 2 * ring.size + other] if block_mask else SOME
        if how == NONE:
            continue
        masking = None if how == ALL else documents_BW
        documents = [None if masking is None else masking[:, i * size : (i + 1) * size] for i in (at, other)]
        place = BlockPosition(
            distance=(at - other) * size, causal=at == other, queries_BT=documents[0], keys_BS=documents[1]
        )
        yield slice(query * size, (query + 1) * size), slice(key * size, (key + 1) * size), place


class _Ring:
    """The ranks of a group, each of which receives from the previous one and sends to the next."""

    def __init__(self, group: str) -> None:
        self._group = _resolve_process_group(group)
        self.size, self.rank = self._group.size(), self._group.rank()
        self._next, self._last = (dist.get_global_rank(self._group, (self.rank + step) % self.size) for step in (1, -1))

    def round(self, own: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(rank, its tensor) of every rank, this one's first; the next is received while one is used."""
        current = own
        for hop in range(self.size):
            coming = self._swap(current) if hop + 1 < self.size else None
            yield (self.rank - hop) % self.size, current
            if coming is not None:
                current = coming()

    def rotate(self, tensor: Tensor) -> Tensor:
        """Send the tensor to the next rank; returns that of the previous one."""
        return self._swap(tensor)()

    def _swap(self, tensor: Tensor) -> Any:
        got = torch.empty_like(tensor)
        ops = [
            dist.P2POp(dist.isend, tensor, self._next, self._group),
            dist.P2POp(dist.irecv, got, self._last, self._group),
        ]
        works = dist.batch_isend_irecv(ops)

        def arrived() -> Tensor:
            for work in works:
                work.wait()
            return got

        return arrived
