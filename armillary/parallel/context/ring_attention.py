"""Ring attention (Liu et al., arXiv 2310.01889): each rank keeps the queries of its tokens while keys and values go
round, so no rank ever holds those of the whole row.

A row is cut into 2·cp pieces, and rank r holds pieces r and 2·cp - 1 - r (zig-zag), so that every rank sees equally
many earlier keys at every turn. Forward and backward are one operator each: compilers and selective recompute see no
parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from armillary.kernels.core.dtype import widen
from armillary.parallel.context.ring_attention_block import Options, Place, Whole, backward, forward, merge

# B batch, T this rank's tokens, W all tokens of the row, N query heads, K KV heads, D head dim

_SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor? documents, Tensor? sinks, Tensor? slopes, float scale, int window, "
    "float softcap, str group, int[] meeting"
)
NONE, SOME, ALL = range(3)
"""how two pieces of packed rows meet: no document is in both, some are, or both are of one"""


def pieces(rank: int, size: int) -> tuple[int, int]:
    """The two of 2·size pieces of a row that a rank holds, in order."""
    return rank, 2 * size - 1 - rank


def meetings(documents_BW: Tensor, size: int) -> list[int]:
    """How every one of the 2·size pieces of rows meets every other: what cannot be seen need not be computed, and what
    is of one document needs no mask. Pieces of many documents count as all that lie between their first and last."""
    cut = documents_BW.unflatten(1, (2 * size, -1))
    low, high = cut.amin(dim=2), cut.amax(dim=2)
    apart = ((high[:, :, None] < low[:, None]) | (low[:, :, None] > high[:, None])).all(dim=0)
    one = ((low == high)[:, :, None] & (low == high)[:, None] & (low[:, :, None] == low[:, None])).all(dim=0)
    found: list[int] = torch.where(apart, NONE, torch.where(one, ALL, SOME)).flatten().tolist()
    return found


def seen_pairs(rank: int, source: int, size: int) -> Iterator[tuple[int, int]]:
    """(piece of this rank's two, piece of the source's two) for those where a query may see a key: three on the
    diagonal, of which two are half hidden, and two everywhere else."""
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
    meeting: list[int],
) -> tuple[Tensor, Tensor]:
    """(output [B, T, N, D], log Σ exp [B, N, T]) of this rank's queries over the keys of all; `documents` [B, W] are
    those of the whole row, and `meeting` says of every piece and every other how they meet (empty: not known)."""
    ring, options = _Ring(group), Options(scale=scale, window=window, softcap=softcap, slopes_N=slopes)
    out = torch.zeros_like(widen(q), memory_format=torch.contiguous_format)
    lse = out.new_full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf)
    for source, (keys, values) in ring.round(torch.stack((k, v))):
        for query, key, place in _places(ring, source, q.shape[1], documents, meeting):
            if place.is_seen(keys.shape[1] // 2, window):
                more = forward(q[:, query], keys[:, key], values[:, key], options, place)
                out[:, query], lse[:, :, query] = merge(out[:, query], lse[:, :, query], *more)
    if sinks is not None:
        whole = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
        out = out * torch.exp(lse - whole).transpose(1, 2)[..., None]
        lse = whole
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
    meeting: list[int],
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(q.shape), q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=wide)


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
    meeting: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dQ, dK, dV, this rank's part of the gradient of the sinks or empty); gradients of keys and values travel round
    behind them, and are at home after the last turn."""
    ring, options = _Ring(group), Options(scale=scale, window=window, softcap=softcap, slopes_N=slopes)
    whole = Whole.of(grad, widen(out), lse)
    dq = torch.zeros_like(widen(q), memory_format=torch.contiguous_format)
    sums: Tensor | None = None
    for source, (keys, values) in ring.round(torch.stack((k, v))):
        added = torch.zeros_like(widen(keys)).new_zeros((2, *keys.shape))
        for query, key, place in _places(ring, source, q.shape[1], documents, meeting):
            if place.is_seen(keys.shape[1] // 2, window):
                made = backward(whole.queries(query), q[:, query], keys[:, key], values[:, key], options, place)
                dq[:, query] += made[0]
                added[0][:, key] += made[1]
                added[1][:, key] += made[2]
        sums = added if sums is None else ring.turn(sums) + added
    assert sums is not None
    dk, dv = (ring.turn(sums) if ring.size > 1 else sums).to(k.dtype)
    if sinks is None:
        return dq.to(q.dtype), dk.clone(), dv.clone(), q.new_empty(0)
    weights_BNT = torch.exp(sinks.to(lse.dtype)[:, None] - lse)
    return dq.to(q.dtype), dk.clone(), dv.clone(), -(weights_BNT * whole.delta_BNT).sum((0, 2)).to(sinks.dtype)


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
    meeting: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dsinks = q.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale, ctx.window, ctx.softcap, ctx.group, ctx.meeting = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors, *output)


def _gradients(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    q, k, v, documents, sinks, slopes, out, lse = ctx.saved_tensors
    settings = (ctx.scale, ctx.window, ctx.softcap, ctx.group, ctx.meeting)
    dq, dk, dv, dsinks = _ring_backward(grad, out, lse, q, k, v, documents, sinks, slopes, *settings)
    return dq, dk, dv, None, None if sinks is None else dsinks, None, *(None,) * 5


ring_attention.register_autograd(_gradients, setup_context=_keep)


def _places(
    ring: _Ring, source: int, num_tokens: int, documents_BW: Tensor | None, meeting: list[int]
) -> Iterator[tuple[slice, slice, Place]]:
    """(this rank's tokens, the source's tokens, where they lie) of every pair of pieces that may meet."""
    size = num_tokens // 2
    for query, key in seen_pairs(ring.rank, source, ring.size):
        at, other = pieces(ring.rank, ring.size)[query], pieces(source, ring.size)[key]
        how = meeting[at * 2 * ring.size + other] if meeting else SOME
        if how == NONE:
            continue
        masking = None if how == ALL else documents_BW
        documents = [None if masking is None else masking[:, i * size : (i + 1) * size] for i in (at, other)]
        place = Place(distance=(at - other) * size, causal=at == other, queries_BT=documents[0], keys_BS=documents[1])
        yield slice(query * size, (query + 1) * size), slice(key * size, (key + 1) * size), place


class _Ring:
    """The ranks of a group, each of which hears from the one before and talks to the one after."""

    def __init__(self, group: str) -> None:
        self._group = _resolve_process_group(group)
        self.size, self.rank = self._group.size(), self._group.rank()
        self._next, self._last = (dist.get_global_rank(self._group, (self.rank + step) % self.size) for step in (1, -1))

    def round(self, own: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(whose, tensor) of every rank, this one's first; the next is on its way while one is used."""
        now = own
        for turn in range(self.size):
            coming = self._swap(now) if turn + 1 < self.size else None
            yield (self.rank - turn) % self.size, now
            if coming is not None:
                now = coming()

    def turn(self, tensor: Tensor) -> Tensor:
        """The tensor of the rank before, for this one's."""
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
