"""From the fused QKV projection to paged attention: split, QK norm, rotary positions, and the cache write.

Rows of the projection are grouped per KV head as [q…, k, v]. The cache is that of `paged_attention`: [pages, 2, KV
heads, page size, head dim].
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from armillary.kernels.attention.attention import AttentionOptions
from armillary.kernels.core.dtype import DTYPES, widen
from armillary.kernels.core.launch import power_of_two
from armillary.kernels.core.op import Case, Op, OpWork, in_triton
from armillary.kernels.paged.cache_codes import to_codes
from armillary.kernels.paged.paged_attention import PagedBatch, paged_attention
from armillary.kernels.pointwise.rope import rotate

# T tokens, N query heads, K KV heads, D head dim, R rotated dims / 2


@dataclass(frozen=True, kw_only=True, eq=False)
class QkvOptions:
    """What a layer applies to queries and keys, in this order: clamp, norm, rotation, scale."""

    clip: float | None = None  # queries, keys and values are clamped to ±clip
    norm: str = "none"  # of each query and key: none, rms or layer
    q_weight: Tensor | None = None  # weight of the query norm: [D] per head, or [N·D] for a norm that spans all heads
    k_weight: Tensor | None = None  # weight of the key norm: [D] or [K·D]
    eps: float = 1e-6
    plus_one: bool = False  # weights are 1 + weight
    interleaved: bool = False  # whether neighbouring dims are rotated together, or the two halves
    q_scale_T: Tensor | None = None  # factor of each token's queries, fp32
    scales_2K: Tensor | None = None  # divisor of keys and values that are written to a quantised cache


def qkv_cache(
    qkv: Tensor, cache: Tensor, slots_T: Tensor, cos_TR: Tensor | None, sin_TR: Tensor | None, options: QkvOptions
) -> tuple[Tensor, Tensor]:
    """Queries [T, N, D], and the cache, in which key and value of token t are now at slot slots[t] (page number · page
    size + place in the page; negative: not written).

    `qkv` is [T, K·(N/K + 2)·D]; the first 2·R dims are rotated by cos and sin [T, R], where given.
    """
    heads, size = cache.shape[2], cache.shape[4]
    if options.clip is not None:
        qkv = qkv.clamp(-options.clip, options.clip)
    grouped = qkv.unflatten(-1, (heads, -1, size))
    q, k, v = grouped[:, :, :-2].flatten(1, 2), grouped[:, :, -2], grouped[:, :, -1]
    q, k = (_normed(widen(x), w, options) for x, w in ((q, options.q_weight), (k, options.k_weight)))
    if cos_TR is not None and sin_TR is not None:
        q, k = (rotate(x, cos_TR[:, None], sin_TR[:, None], interleaved=options.interleaved) for x in (q, k))
    if options.q_scale_T is not None:
        q = q * options.q_scale_T[:, None, None]
    _write(cache, slots_T, k, widen(v), options.scales_2K)
    return q.to(qkv.dtype), cache


def unpadded(
    qkv: Tensor, cache: Tensor, slots_T: Tensor, cos_TR: Tensor | None, sin_TR: Tensor | None, options: QkvOptions
) -> tuple[Tensor, Tensor]:
    """qkv_cache in fewer torch calls, for CPUs: queries and keys are processed together, and every token is written."""
    heads, page, size = cache.shape[2:]
    scaled = options.scales_2K is not None or options.q_scale_T is not None
    if not _alike(options, size) or scaled or not len(qkv) or int(slots_T.min()) < 0:
        return qkv_cache(qkv, cache, slots_T, cos_TR, sin_TR, options)
    if options.clip is not None:
        qkv = qkv.clamp(-options.clip, options.clip)
    grouped = qkv.unflatten(-1, (heads, -1, size))
    qk = _normed_together(widen(grouped[:, :, :-1]), options)
    if cos_TR is not None and sin_TR is not None:
        qk = rotate(qk, cos_TR[:, None, None], sin_TR[:, None, None], interleaved=options.interleaved)
    qk = qk.to(qkv.dtype)
    kv_T2KD = torch.stack((qk[:, :, -1], grouped[:, :, -1]), dim=1).to(cache.dtype)
    heads_first = cache.permute(1, 2, 0, 3, 4)
    if heads_first.is_contiguous():  # then a slot is an index into one list (paged_attention.by_heads)
        heads_first.view(2, heads, -1, size).index_copy_(2, slots_T, kv_T2KD.permute(1, 2, 0, 3))
    else:
        cache.permute(0, 3, 1, 2, 4).index_put_((slots_T // page, slots_T % page), kv_T2KD)
    return qk[:, :, :-1].flatten(1, 2), cache


def _alike(options: QkvOptions, size: int) -> bool:
    """Whether queries and keys have the same norm, each head alone."""
    sizes = {None if weight is None else weight.numel() for weight in (options.q_weight, options.k_weight)}
    return options.norm == "none" or sizes in ({None}, {size})


def _normed_together(qk_TKGD: Tensor, options: QkvOptions) -> Tensor:
    """Queries and the key of each KV head, the key last."""
    q_weight, k_weight = options.q_weight, options.k_weight
    if options.norm == "none" or q_weight is None or k_weight is None:
        return _normed(qk_TKGD, None, options)
    scales = torch.stack((*[q_weight] * (qk_TKGD.shape[2] - 1), k_weight)).to(qk_TKGD.dtype)
    return _normed(qk_TKGD, None, options) * (scales + 1.0 if options.plus_one else scales)


def _normed(x_TND: Tensor, weight: Tensor | None, options: QkvOptions) -> Tensor:
    if options.norm == "none":
        return x_TND
    all_heads = weight is not None and weight.numel() != x_TND.shape[-1]
    x = x_TND.flatten(1) if all_heads else x_TND
    if options.norm == "rms":
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + options.eps)
    else:
        x = F.layer_norm(x, x.shape[-1:], eps=options.eps)
    if weight is not None:
        x = x * (weight.to(x.dtype) + (1.0 if options.plus_one else 0.0))
    return x.view_as(x_TND)


def _write(cache: Tensor, slots_T: Tensor, k_TKD: Tensor, v_TKD: Tensor, scales_2K: Tensor | None) -> None:
    valid = slots_T >= 0
    slots = slots_T[valid].long()
    page, place = slots // cache.shape[3], slots % cache.shape[3]
    for index, x in enumerate((k_TKD[valid], v_TKD[valid])):
        if scales_2K is not None:
            x = to_codes(x, scales_2K[index][None, :, None], cache.dtype)
        cache[:, index].transpose(1, 2)[page, place] = x.to(cache.dtype)


@dataclass(frozen=True, kw_only=True)
class QkvCase(Case):
    """Tokens of one step."""

    tokens: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    rotary: int = 128  # rotated dims; 0: none
    norm: str = "rms"  # none, rms or layer
    all_heads: bool = False  # whether the norm spans all heads
    interleaved: bool = False  # whether rotated pairs are neighbours
    page: int = 16


def _inputs(case: QkvCase, generator: torch.Generator) -> tuple[Any, ...]:
    device, dtype = generator.device, DTYPES[case.dtype]
    normal = partial(torch.randn, generator=generator, device=device)
    pages = -(-case.tokens // case.page) + 1
    order = torch.randperm(pages, generator=generator, device=device)
    slots = (order[:, None] * case.page + torch.arange(case.page, device=device)).flatten()[: case.tokens]
    slots[3::101] = -1
    weights: list[Tensor | None] = [None, None]
    if case.norm != "none":
        sizes = [count * case.head_dim if case.all_heads else case.head_dim for count in (case.heads, case.kv_heads)]
        weights = [(1 + normal(size) / 4).to(dtype) for size in sizes]
    angles = normal(case.tokens, case.rotary // 2) if case.rotary else None
    return (
        normal(case.tokens, (case.heads + 2 * case.kv_heads) * case.head_dim).to(dtype),
        torch.zeros(pages, 2, case.kv_heads, case.page, case.head_dim, dtype=dtype, device=device),
        slots,
        None if angles is None else angles.cos(),
        None if angles is None else angles.sin(),
        QkvOptions(norm=case.norm, q_weight=weights[0], k_weight=weights[1], interleaved=case.interleaved),
    )


def _work(case: QkvCase) -> OpWork:
    """The projection is read and written once, cos and sin are read."""
    values = case.tokens * (case.heads + 2 * case.kv_heads) * case.head_dim
    moved = 2 * values * DTYPES[case.dtype].itemsize + case.tokens * case.rotary * 4
    return OpWork(flops=8.0 * values, bytes=float(moved), ceiling="copy")


def refuses(case: QkvCase) -> str | None:
    return "a norm over all heads needs every head in one program" if case.all_heads and case.norm != "none" else None


QKV_CACHE = Op(
    name="qkv_cache",
    reference=qkv_cache,
    versions=(in_triton("paged.qkv_to_cache_triton", "qkv_cache", refuses=refuses),),
    inputs=_inputs,
    work=_work,
    writes=(1,),
    small=lambda case: replace(case, tokens=min(case.tokens, 4099)),
    cases={
        "Qwen3-8B, 16k tokens": QkvCase(tokens=16384),
        "Llama-3-8B, 8k tokens": QkvCase(tokens=8192, norm="none"),
        "Qwen3-8B, 256 decoding": QkvCase(tokens=256),
        "Qwen3-8B, 1 decoding": QkvCase(tokens=1),
    },
)


# --- the one new token of each of a few sequences, from the projection through attention: decoding of a single stream

# most sequences, and most tokens of a block table: for longer contexts the split kernel reads faster
MOST_SEQUENCES, MAX_TOKENS = 4, 65536


def attend_tokens(
    qkv: Tensor,
    cache: Tensor,
    slots_T: Tensor,
    cos_TR: Tensor | None,
    sin_TR: Tensor | None,
    heads: QkvOptions,
    batch: PagedBatch,
    options: AttentionOptions,
) -> Tensor:
    """[T, N·D]: attention of token t, the newest of sequence t, after its key and value are written to the cache."""
    q_TND, cache = qkv_cache(qkv, cache, slots_T, cos_TR, sin_TR, heads)
    return paged_attention(q_TND, cache, batch, options).flatten(1)


def can_attend(
    qkv: Tensor, cache: Tensor, cos_TR: Tensor | None, heads: QkvOptions, batch: PagedBatch, options: AttentionOptions
) -> bool:
    """Whether the kernel can take these: few sequences, heads rotated whole or not at all, scores without soft cap and
    slopes."""
    size = cache.shape[4]
    few = batch.max_query == 1 and 0 < len(qkv) == len(batch.tables_BP) <= MOST_SEQUENCES
    few = few and batch.tables_BP.shape[1] * cache.shape[3] <= MAX_TOKENS
    rotates = cos_TR is None or 2 * cos_TR.shape[-1] == size
    sizes = {None if weight is None else weight.numel() for weight in (heads.q_weight, heads.k_weight)}
    normed = heads.norm == "none" or (heads.norm == "rms" and sizes in ({size}, {None}))
    unscaled = heads.clip is None and heads.scales_2K is None and options.scales_2K is None
    numbers = cache.dtype == qkv.dtype != torch.float64 and power_of_two(size) == size and 32 <= size <= 256
    simple = not options.softcap and options.slopes_N is None and options.scale_for(size) > 0
    return few and rotates and normed and numbers and unscaled and simple
