"""Launches of our attention kernels, as one custom op forward and one backward.

The mask is reduced on the device to ranges (documents) or lists (block-sparse masks) of blocks, so that kernels skip
what is not visible and nothing waits for the CPU.
"""

from typing import Any

import torch
from torch import Tensor

from armillary.kernels.attention.attention import PLAIN, AttentionOptions, reference
from armillary.kernels.attention.forward_triton import forward_kernel
from armillary.kernels.attention.gradients import LOG2E, Masks, both_gradients, grid_of, row_sums, scale_factors
from armillary.kernels.attention.mask_triton import mask_arguments
from armillary.kernels.attention.tiles import attention_tiles, can_copy, described
from armillary.kernels.core.launch import ceil_div, dense, on, power_of_two, unit_stride
from armillary.kernels.core.requirements import note_once

# B batch, T queries, S keys, N query heads, K KV heads, D head dim


def merged_heads(q_BTND: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, options: AttentionOptions = PLAIN) -> Tensor:
    """`attention` with programs in the order of blocks, of all heads, so that the longest start first; its backward
    pass goes over all heads that share keys in one loop, and under lists of blocks computes dQ beside dK and dV."""
    return attention(q_BTND, k_BSKD, v_BSKD, options, merged=True)


def attention(
    q_BTND: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, options: AttentionOptions = PLAIN, *, merged: bool = False
) -> Tensor:
    """attention.reference by our own kernels; head dims that they cannot hold go to the reference."""
    why = _unsupported(q_BTND, v_BSKD)
    if why:
        if not torch.compiler.is_compiling():
            note_once(f"attention is left to plain torch: {why}")
        return reference(q_BTND, k_BSKD, v_BSKD, options)
    return _attention(
        q_BTND,
        k_BSKD,
        v_BSKD,
        options.documents_BT,
        options.blocks_XY,
        options.sinks_N,
        options.slopes_N,
        options.scale_for(q_BTND.shape[-1]),
        options.window,
        options.softcap,
        options.causal,
        merged,
    )[0]


def _unsupported(q_BTND: Tensor, v_BSKD: Tensor) -> str | None:
    """Why our kernels cannot take these."""
    if v_BSKD.shape[-1] != q_BTND.shape[-1]:
        return f"values of {v_BSKD.shape[-1]} dims, queries of {q_BTND.shape[-1]}"
    if q_BTND.shape[-1] > 256:
        return f"heads of {q_BTND.shape[-1]} dims are too wide for registers"
    return "fp64" if q_BTND.dtype == torch.float64 else None


_SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor? documents, Tensor? blocks, Tensor? sinks, Tensor? slopes, float scale, "
    "int window, float softcap, bool causal, bool merged=False"
)


@torch.library.custom_op("armillary::attention", mutates_args=(), schema=f"({_SCHEMA}) -> (Tensor, Tensor)")
def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    blocks: Tensor | None,
    sinks: Tensor | None,
    slopes: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
    causal: bool,
    merged: bool = False,
) -> tuple[Tensor, Tensor]:
    """(output, log-sum-exp in base 2 [B, N, T])."""
    out, lse = _empty(q, k, v, documents, blocks, sinks, slopes, scale, window, softcap, causal)
    if not out.numel() or not k.numel():
        return out.zero_(), lse.fill_(torch.inf)
    q, k, v = (unit_stride(x) for x in (q, k, v))
    sinks, slopes = dense(sinks), dense(slopes)
    (B, T, N, D), (S, K) = q.shape, k.shape[1:3]
    shareable = N // K if blocks is None and slopes is None else 1
    tiles = attention_tiles("forward", q, packed=documents is not None, window=window, group=shareable)
    flags, mask, lists = mask_arguments(
        documents, blocks, window, softcap, causal, slopes, T, S, tiles.keys, ends=False
    )
    listed, counts = lists.by_query if lists else (lse, lse)
    tma = can_copy(k, v)
    k_src, v_src = (described(x, tiles.keys) if tma else x for x in (k, v))
    with on(q):
        programs = ceil_div(T, tiles.queries // tiles.pack), N // tiles.pack, B
        forward_kernel[grid_of(*programs, heads_first=merged)](
            q,
            k_src,
            v_src,
            out,
            lse,
            mask.documents,
            mask.begin,
            mask.run,
            listed,
            counts,
            sinks,
            slopes,
            *q.stride()[:3],
            *k.stride()[:3],
            *v.stride()[:3],
            T,
            S,
            N,
            N // K,
            *scale_factors(scale, softcap)[1:],
            window,
            listed.shape[-1],
            **flags,
            SINKS=sinks is not None,
            FP32=q.dtype == torch.float32,
            D=D,
            BLOCK_D=max(16, power_of_two(D)),
            BLOCK_M=tiles.queries,
            BLOCK_N=tiles.keys,
            STAGES=tiles.stages,
            EDGE_STAGES=tiles.edge_stages or tiles.stages,
            PACK=tiles.pack,
            RAW=scale > 0 and not softcap and slopes is None,
            HEADS_FIRST=merged,
            TMA=tma,
            num_warps=tiles.warps,
        )
    return out, lse


@_attention.register_fake
def _empty(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    blocks: Tensor | None,
    sinks: Tensor | None,
    slopes: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
    causal: bool,
    merged: bool = False,
) -> tuple[Tensor, Tensor]:
    B, T, N, _ = q.shape
    return q.new_empty(q.shape), q.new_empty(B, N, T, dtype=torch.float32)


@torch.library.custom_op(
    "armillary::attention_backward",
    mutates_args=(),
    schema=f"(Tensor grad, Tensor out, Tensor lse, {_SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _attention_backward(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    blocks: Tensor | None,
    sinks: Tensor | None,
    slopes: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
    causal: bool,
    merged: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dQ, dK, dV, gradient of the sinks or empty)."""
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    if not out.numel() or not k.numel():
        dsinks = q.new_zeros(0) if sinks is None else torch.zeros_like(sinks)
        return dq.zero_(), dk.zero_(), dv.zero_(), dsinks
    q, k, v, grad = (unit_stride(x) for x in (q, k, v, grad))
    slopes = dense(slopes)
    masks = Masks(documents, blocks, slopes, window, softcap, causal)
    with on(q):
        delta = row_sums(grad, out)
        shared = (grad, lse, delta)
        both_gradients(q, k, v, shared, (dq, dk, dv), masks, scale_factors(scale, softcap), merged=merged)
    if sinks is None:
        return dq, dk, dv, q.new_empty(0)
    weights = torch.exp2(sinks.float()[:, None] * LOG2E - lse)
    return dq, dk, dv, -(weights * delta).sum((0, 2)).to(sinks.dtype)


@_attention_backward.register_fake
def _(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    blocks: Tensor | None,
    sinks: Tensor | None,
    slopes: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
    causal: bool,
    merged: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dsinks = q.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, documents, blocks, sinks, slopes, *ctx.options = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, documents, blocks, sinks, slopes, out, lse)


def _gradients(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Any, ...]:
    q, k, v, documents, blocks, sinks, slopes, out, lse = ctx.saved_tensors
    if grad is None:
        return (None,) * 12
    arguments = (q, k, v, documents, blocks, sinks, slopes, *ctx.options)
    dq, dk, dv, dsinks = _attention_backward(grad, out, lse, *arguments)
    return dq, dk, dv, None, None, None if sinks is None else dsinks, *(None,) * 6


_attention.register_autograd(_gradients, setup_context=_setup_context)
