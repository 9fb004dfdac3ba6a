"""The attention functions that are passed to the model: plain causal, and packed documents.

`attend(layer, q, k, v, options)` alone owns caches and masks, so one model trains, prefills and decodes. These are the
reference functions in plain torch; faster ones have the same signature.
"""

import math
from collections.abc import Callable, Mapping
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from armillary.kernels.attention.attention import AttentionOptions, in_chunks
from armillary.kernels.core.dtype import widen
from armillary.kernels.delta.gated_delta import DeltaHeads, gated_delta
from armillary.kernels.simplicial.simplicial import by_blocks

# B batch, T queries, S keys, N query heads, K KV heads, D head dim


Attend = Callable[[int, Tensor, Tensor, Tensor, AttentionOptions], Tensor]
AttentionFunction = Callable[..., Tensor]


class OverLatents:
    """An `Attend` over a cache of latents: it takes absorbed queries, one KV head of latents with their rotary key, and
    values that are the first dims of these keys (`latent_attention.LatentAttention`)."""

    def __init__(self, attend: Attend) -> None:
        self._attend = attend

    def __call__(self, layer: int, q_BTNL: Tensor, k_BT1L: Tensor, v_BT1C: Tensor, options: AttentionOptions) -> Tensor:
        return self._attend(layer, q_BTNL, k_BT1L, v_BT1C, options)


Recur = Callable[[int, Tensor, Tensor, Tensor, Tensor, DeltaHeads], Tensor]
"""recur(layer, qkv_BTC, decay_BTV, beta_BTV, conv_CW, heads) -> out_BTVE"""


class WithState:
    """An `Attend` that keeps the states of gated delta-net layers beside its cache, and continues from them."""

    def __init__(self, attend: Attend, recur: Recur) -> None:
        self._attend, self.recur = attend, recur

    def __call__(self, layer: int, q_BTND: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, options: AttentionOptions) -> Tensor:
        return self._attend(layer, q_BTND, k_BTKD, v_BTKD, options)


def recurrence(attend: Attend) -> Recur:
    """What gated delta-net layers do under an `Attend`: continue from its states, else begin with every row, or with
    every document of it."""
    if isinstance(attend, WithState):
        return attend.recur
    documents_BT: Tensor | None = getattr(attend, "documents_BT", None)

    def recur(
        layer: int, qkv_BTC: Tensor, decay_BTV: Tensor, beta_BTV: Tensor, conv_CW: Tensor, heads: DeltaHeads
    ) -> Tensor:
        return gated_delta(qkv_BTC, decay_BTV, beta_BTV, conv_CW, heads, documents_BT=documents_BT)[0]

    return recur


def _over(attend: Attend, documents_BT: Tensor | None) -> Attend:
    """The same function, which says the documents of its rows to layers that keep a state."""
    attend.documents_BT = documents_BT  # type: ignore[attr-defined]
    return attend


def plain(layer: int, q_BTND: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, options: AttentionOptions) -> Tensor:
    """Causal attention within the call: every row is one sequence from its first token on."""
    if options.pair_windows[0]:
        return by_blocks(q_BTND, k_BTKD, v_BTKD, options)
    num_tokens = q_BTND.shape[1]
    reach = options.window or options.chunk
    if options.is_plain and (not reach or num_tokens <= reach):
        return _sdpa(q_BTND, k_BTKD, v_BTKD, options.scale, causal=True)
    index_1T = torch.arange(num_tokens, device=q_BTND.device)[None]
    return masked(q_BTND, k_BTKD, v_BTKD, options, index_1T, index_1T, None)


def packed(documents_BT: Tensor) -> Attend:
    """Causal attention inside documents: rows hold several, numbered by `documents_BT`."""
    same_BTS = documents_BT[:, :, None] == documents_BT[:, None, :]
    index_1T = torch.arange(documents_BT.shape[1], device=documents_BT.device)[None]

    def same(chunk: int) -> Tensor:
        """[B, T, S]: whether two tokens are of one document, and of one chunk of it."""
        if not chunk:
            return same_BTS
        numbers_BT = in_chunks(documents_BT, chunk, documents_BT.shape[0], documents_BT.shape[1], documents_BT.device)
        return numbers_BT[:, :, None] == numbers_BT[:, None, :]

    @cache
    def added(window: int, chunk: int, dtype: torch.dtype) -> Tensor:
        """The additive mask, computed once: torch would convert, and keep, a boolean mask in every layer."""
        hidden_BTS = ~_visible(index_1T, index_1T, window, 0, same(chunk))
        return torch.zeros(hidden_BTS.shape, dtype=dtype, device=hidden_BTS.device).masked_fill_(hidden_BTS, -torch.inf)

    def attend(layer: int, q_BTND: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, options: AttentionOptions) -> Tensor:
        if options.pair_windows[0]:
            return by_blocks(q_BTND, k_BTKD, v_BTKD, _without_chunk(options, documents_BT))
        if options.is_plain and not torch.compiler.is_compiling():
            mask_BTS = added(options.window, options.chunk, q_BTND.dtype)
            return _sdpa(q_BTND, k_BTKD, v_BTKD, options.scale, mask=mask_BTS[:, None])
        return masked(q_BTND, k_BTKD, v_BTKD, _without_chunk(options), index_1T, index_1T, same(options.chunk))

    return _over(attend, documents_BT)


Sight = int | tuple[int, int] | None
"""the window of a layer, or its two windows of pairs; None: all tokens"""


def chosen(functions: Mapping[tuple[Sight, bool], AttentionFunction], documents_BT: Tensor | None) -> Attend:
    """Plain or packed attention by the functions that were chosen for a layer's window and for rows with or without
    documents, with the signature of `kernels.attention.attention.reference`; the reference functions where none was."""

    @cache
    def otherwise() -> Attend:  # a mask that most models never need
        return plain if documents_BT is None else packed(documents_BT)

    def attend(layer: int, q_BTND: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, options: AttentionOptions) -> Tensor:
        numbers_BT = documents_BT
        if options.chunk:  # documents are split into chunks, which every version has
            numbers_BT = in_chunks(documents_BT, options.chunk, q_BTND.shape[0], q_BTND.shape[1], q_BTND.device)
        pair_windows = options.pair_windows if options.pair_windows[0] else None
        run = functions.get((pair_windows or options.window or None, numbers_BT is not None))
        if run is None:
            return otherwise()(layer, q_BTND, k_BTKD, v_BTKD, options)
        return run(q_BTND, k_BTKD, v_BTKD, _without_chunk(options, numbers_BT))

    return _over(attend, documents_BT)


def _without_chunk(options: AttentionOptions, documents_BT: Tensor | None = None) -> AttentionOptions:
    """With documents instead; field by field, because this runs inside compiled blocks."""
    return AttentionOptions(
        documents_BT=documents_BT,
        sinks_N=options.sinks_N,
        slopes_N=options.slopes_N,
        scale=options.scale,
        window=options.window,
        softcap=options.softcap,
        pair_windows=options.pair_windows,
    )


def masked(
    q_BTND: Tensor,
    k_BSKD: Tensor,
    v_BSKD: Tensor,
    options: AttentionOptions,
    query_BT: Tensor,
    key_BS: Tensor,
    allowed_BTS: Tensor | None,
) -> Tensor:
    """Attention over an explicit mask: causal by position, inside the window or chunk, and where `allowed`."""
    mask_BTS = _visible(query_BT, key_BS, options.window, options.chunk, allowed_BTS)
    if options.is_plain:
        return _sdpa(q_BTND, k_BSKD, v_BSKD, options.scale, mask=mask_BTS[:, None])
    distance_BTS = query_BT[:, :, None] - key_BS[:, None, :]
    return _explicit(q_BTND, k_BSKD, v_BSKD, options, mask_BTS, distance_BTS)


def _visible(query_BT: Tensor, key_BS: Tensor, window: int, chunk: int, allowed_BTS: Tensor | None) -> Tensor:
    distance_BTS = query_BT[:, :, None] - key_BS[:, None, :]
    mask_BTS = distance_BTS >= 0
    if window:
        mask_BTS = mask_BTS & (distance_BTS < window)
    if chunk:
        mask_BTS = mask_BTS & (query_BT[:, :, None] // chunk == key_BS[:, None, :] // chunk)
    return mask_BTS if allowed_BTS is None else mask_BTS & allowed_BTS


def _sdpa(
    q_BTND: Tensor,
    k_BSKD: Tensor,
    v_BSKD: Tensor,
    scale: float | None,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q_BTND, k_BSKD, v_BSKD))
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped)
    return out.transpose(1, 2)


def _explicit(
    q_BTND: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, options: AttentionOptions, mask_BTS: Tensor, distance_BTS: Tensor
) -> Tensor:
    """Materialised scores, for soft caps, sinks and ALiBi; softmax in fp32."""
    group = q_BTND.shape[2] // k_BSKD.shape[2]
    k_BSND, v_BSND = k_BSKD.repeat_interleave(group, dim=2), v_BSKD.repeat_interleave(group, dim=2)
    scores_BNTS = widen(torch.einsum("btnd,bsnd->bnts", q_BTND, k_BSND)) * options.scale_for(q_BTND.shape[-1])
    if options.softcap:
        scores_BNTS = options.softcap * torch.tanh(scores_BNTS / options.softcap)
    if options.slopes_N is not None:
        scores_BNTS = scores_BNTS - options.slopes_N[None, :, None, None] * distance_BTS[:, None]
    scores_BNTS = scores_BNTS.masked_fill(~mask_BTS[:, None], -torch.inf)
    weights_BNTS = _softmax(scores_BNTS, options.sinks_N).to(q_BTND.dtype)
    return torch.einsum("bnts,bsnd->btnd", weights_BNTS, v_BSND)


def _softmax(scores_BNTS: Tensor, sinks_N: Tensor | None) -> Tensor:
    if sinks_N is None:
        return scores_BNTS.softmax(dim=-1)
    sink = sinks_N.to(scores_BNTS.dtype)[None, :, None, None].expand(*scores_BNTS.shape[:3], 1)
    return torch.cat((scores_BNTS, sink), dim=-1).softmax(dim=-1)[..., :-1]


def alibi_slopes(num_heads: int, alibi_max: float) -> Tensor:
    """Slopes of Press et al. 2021; a number of heads that is no power of two takes every other slope of the next
    power."""
    power = 2 ** math.ceil(math.log2(num_heads))
    slopes = 2.0 ** (-torch.arange(1, power + 1, dtype=torch.float32) * alibi_max / power)
    if power != num_heads:
        slopes = torch.cat((slopes[1::2], slopes[::2]))
    return slopes[:num_heads]
