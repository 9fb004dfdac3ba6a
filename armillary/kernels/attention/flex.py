"""Attention by torch's flex_attention, which compiles mask and score modifications into its kernel."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from armillary.kernels.attention.attention import BLOCK, PLAIN, AttentionOptions


def attention(q_BTND: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, options: AttentionOptions = PLAIN) -> Tensor:
    """attention.reference without sinks; the block mask of documents is built anew for every call."""
    assert options.sinks_N is None, "flex_attention has no sinks"
    q, k, v = (x.transpose(1, 2) for x in (q_BTND, k_BSKD, v_BSKD))
    T, S, shift = q.shape[2], k.shape[2], k.shape[2] - q.shape[2]
    documents_BT, blocks_XY = options.documents_BT, options.blocks_XY
    if documents_BT is None and blocks_XY is None:
        mask = _fixed_mask(T, S, options.window, options.causal, q.device)
    else:
        seen = _seen(shift, options.window, options.causal, documents_BT, blocks_XY)
        mask = _compiled(create_block_mask)(seen, None if documents_BT is None else len(q), None, T, S, device=q.device)
    out = _compiled(flex_attention)(
        q,
        k,
        v,
        score_mod=_change(shift, options.softcap, options.slopes_N),
        block_mask=mask,
        scale=options.scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out.transpose(1, 2)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)


@cache
def _fixed_mask(num_queries: int, num_keys: int, window: int, causal: bool, device: torch.device) -> BlockMask:
    seen = _seen(num_keys - num_queries, window, causal, None, None)
    return create_block_mask(seen, None, None, num_queries, num_keys, device=device)


def _seen(
    shift: int, window: int, causal: bool, documents_BT: Tensor | None, blocks_XY: Tensor | None
) -> Callable[..., Tensor]:
    def seen(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        distance = query + shift - key
        allowed = distance >= 0 if causal else distance == distance
        if window:
            allowed = allowed & (distance < window)
        if documents_BT is not None:
            allowed = allowed & (documents_BT[b, query] == documents_BT[b, key])
        if blocks_XY is not None:
            allowed = allowed & blocks_XY[query // BLOCK, key // BLOCK]
        return allowed

    return seen


def _change(shift: int, softcap: float, slopes_N: Tensor | None) -> Callable[..., Tensor] | None:
    if not softcap and slopes_N is None:
        return None

    def change(score: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if softcap:
            score = softcap * torch.tanh(score / softcap)
        return score if slopes_N is None else score - slopes_N[h] * (query + shift - key)

    return change
