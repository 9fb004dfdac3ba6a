"""Launches of the backward pass of attention: row sums, dK and dV, dQ."""

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from armillary.kernels.attention import tiles as tile_table
from armillary.kernels.attention.attention import BLOCK
from armillary.kernels.attention.backward_triton import delta_kernel
from armillary.kernels.attention.key_gradient_triton import key_kernel
from armillary.kernels.attention.mask_triton import Lists, Runs, mask_arguments
from armillary.kernels.attention.query_gradient_triton import query_kernel
from armillary.kernels.attention.tiles import AttentionTiles, attention_tiles, can_copy, described, is_narrow
from armillary.kernels.core.launch import ceil_div, power_of_two, side_stream

# B batch, T queries, S keys, N query heads, K KV heads, D head dim

LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class Masks:
    """What hides keys from queries, and what changes their scores."""

    documents: Tensor | None
    blocks: Tensor | None
    slopes: Tensor | None
    window: int
    softcap: float
    causal: bool


def scale_factors(scale: float, softcap: float) -> tuple[float, float, float]:
    """The scale itself, the factor of q·k in the kernel, and the cap, the last two in base-2 units."""
    return (scale, scale / softcap, softcap * LOG2E) if softcap else (scale, scale * LOG2E, 0.0)


def row_sums(grad: Tensor, out: Tensor) -> Tensor:
    """sum(out · d out) of each query and head: [B, N, T]."""
    B, T, N, D = out.shape
    delta = torch.empty(B, N, T, dtype=torch.float32, device=out.device)
    delta_kernel[(ceil_div(T, 64), N, B)](
        out, grad, delta, *grad.stride()[:3], T, N, D=D, BLOCK_D=max(16, power_of_two(D)), BLOCK_M=64, num_warps=4
    )
    return delta


def both_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shared: tuple[Tensor, Tensor, Tensor],
    outputs: tuple[Tensor, Tensor, Tensor],
    masks: Masks,
    factors: tuple[float, float, float],
    *,
    merged: bool,
) -> None:
    """Into (dQ, dK, dV); `shared`: gradient and log-sum-exp of the output, and their row sums. `merged`: programs in
    the order of blocks, of all heads, dK and dV by loops over all heads; and where lists of blocks differ in length, dQ
    on a second stream, by programs that fill the places that the last of the other kernel leave."""
    narrow = tile_table.ONE_LOOP_NARROW and is_narrow(q, masks.window) and masks.blocks is None and masks.slopes is None
    concurrent = merged and masks.blocks is not None
    key_tiles = attention_tiles("key", q, window=masks.window)
    query_tiles = attention_tiles("query", q, concurrent=concurrent)
    flags, runs, lists = mask_arguments(
        masks.documents,
        masks.blocks,
        masks.window,
        masks.softcap,
        masks.causal,
        masks.slopes,
        q.shape[1],
        k.shape[1],
        key_tiles.queries,
        ends=True,
    )
    numbers = (*factors, masks.window)
    flags |= {"NARROW": narrow, "HEADS_FIRST": merged}
    key_flags = flags | {"MERGED": merged or narrow, "HEADS_FIRST": merged or lists is not None}
    by_query = lists.by_query if lists else None
    other = torch.cuda.current_stream(q.device) if concurrent and q.is_cuda else None
    if other is not None:
        other = side_stream(other)
        other.wait_stream(torch.cuda.current_stream(q.device))
    _key_gradients(q, k, v, shared, outputs[1:], masks, runs, lists, key_flags, numbers, key_tiles)
    flags["LISTED"] = BLOCK // query_tiles.keys if lists else 0
    with _on_stream(other):
        _query_gradients(q, k, v, shared, outputs[0], masks, runs, by_query, flags, numbers, query_tiles)
    if other is not None:
        torch.cuda.current_stream(q.device).wait_stream(other)


def _on_stream(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def grid_of(blocks: int, heads: int, batch: int, *, heads_first: bool) -> tuple[int, int, int]:
    """Of programs, as `scores_triton.place` takes it."""
    return (heads * batch, blocks, 1) if heads_first else (blocks, heads, batch)


def _sizes(q: Tensor, k: Tensor) -> dict[str, Any]:
    D = q.shape[-1]
    return {"FP32": q.dtype == torch.float32, "D": D, "BLOCK_D": max(16, power_of_two(D))}


def _key_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shared: tuple[Tensor, Tensor, Tensor],
    outputs: tuple[Tensor, ...],
    masks: Masks,
    runs: Runs,
    lists: Lists | None,
    flags: dict[str, Any],
    numbers: tuple[Any, ...],
    tiles: AttentionTiles,
) -> None:
    (B, T, N, _), (S, K), (grad, lse, delta) = q.shape, k.shape[1:3], shared
    listed, counts = lists.by_key if lists else (lse, lse)
    blocks = len(counts) * (BLOCK // tiles.keys) if lists else ceil_div(S, tiles.keys)
    order = longest_first(counts) if lists else lse
    tma = can_copy(q, grad)
    q_src, grad_src = (described(x, tiles.queries) if tma else x for x in (q, grad))
    key_kernel[grid_of(blocks, K, B, heads_first=flags["HEADS_FIRST"])](
        q_src,
        k,
        v,
        grad_src,
        *outputs,
        lse,
        delta,
        runs.documents,
        runs.end,
        runs.run_end,
        listed,
        counts,
        order,
        masks.slopes,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *grad.stride()[:3],
        T,
        S,
        N,
        N // K,
        *numbers,
        listed.shape[-1],
        **flags,
        **_sizes(q, k),
        BLOCK_M=tiles.queries,
        BLOCK_N=tiles.keys,
        STAGES=tiles.stages,
        TMA=tma,
        num_warps=tiles.warps,
    )


def longest_first(counts: Tensor) -> Tensor:
    """Rows of lists with these numbers of blocks [Y, 2], those with most blocks first."""
    return counts[:, 1].argsort(descending=True, stable=True).int()


def _query_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shared: tuple[Tensor, Tensor, Tensor],
    dq: Tensor,
    masks: Masks,
    runs: Runs,
    by_query: tuple[Tensor, Tensor] | None,
    flags: dict[str, Any],
    numbers: tuple[Any, ...],
    tiles: AttentionTiles,
) -> None:
    (B, T, N, _), (S, K), (grad, lse, delta) = q.shape, k.shape[1:3], shared
    listed, counts = by_query or (lse, lse)
    tma = can_copy(k, v)
    k_src, v_src = (described(x, tiles.keys) if tma else x for x in (k, v))
    query_kernel[grid_of(ceil_div(T, tiles.queries), N, B, heads_first=flags["HEADS_FIRST"])](
        q,
        k_src,
        v_src,
        grad,
        dq,
        lse,
        delta,
        runs.documents,
        runs.begin,
        runs.run,
        listed,
        counts,
        masks.slopes,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *grad.stride()[:3],
        T,
        S,
        N,
        N // K,
        *numbers,
        listed.shape[-1],
        **flags,
        **_sizes(q, k),
        BLOCK_M=tiles.queries,
        BLOCK_N=tiles.keys,
        STAGES=tiles.stages,
        TMA=tma,
        num_warps=tiles.warps,
    )
