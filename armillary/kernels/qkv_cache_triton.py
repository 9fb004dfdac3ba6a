"""One launch from the fused projection to attention: split, QK norm, rotary positions, cache write.

A program takes a few tokens and a few of the rows [q…, k, v] of their KV heads. Every row is read once as the two
halves that rotate with each other and the rest that does not, and is written once: queries to a tensor of their own,
keys and values to their page.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from armillary.kernels.launch import ceil_div, on, power_of_two

_HEADS, _MANY_TOKENS, _FP8_MAX = 16, 2048, 448.0


@triton.jit
def _moments(first, second, rest, first_there, second_there, rest_there, D: tl.constexpr, NORM: tl.constexpr):
    """Mean (0 for RMS) and mean square about it of each row, over the dims that are there."""
    mean = tl.zeros_like(tl.sum(first, 2))
    if NORM == 2:
        mean = (tl.sum(first, 2) + tl.sum(second, 2) + tl.sum(rest, 2)) / D
        first = tl.where(first_there, first - mean[:, :, None], 0.0)
        second = tl.where(second_there, second - mean[:, :, None], 0.0)
        rest = tl.where(rest_there, rest - mean[:, :, None], 0.0)
    square = (tl.sum(first * first, 2) + tl.sum(second * second, 2) + tl.sum(rest * rest, 2)) / D
    return mean, square


@triton.jit
def _scaled(
    x, mean, inverse, q_weight, k_weight, dim, there, is_k, PLUS_ONE: tl.constexpr, HAS_WEIGHT: tl.constexpr
):
    """The norm applied to a part of the dims."""
    x = (x - mean[:, :, None]) * inverse[:, :, None]
    if HAS_WEIGHT:
        q_w = tl.load(q_weight + dim, mask=there, other=0.0).to(tl.float32)
        k_w = tl.load(k_weight + dim, mask=there, other=0.0).to(tl.float32)
        weight = tl.where(is_k[:, :, None], k_w[None, None, :], q_w[None, None, :])
        x = x * (weight + 1.0) if PLUS_ONE else x * weight
    return x


@triton.jit
def _stored(x, cache, scale, HAS_SCALES: tl.constexpr, LARGEST: tl.constexpr):
    """A value in the cache's format."""
    if HAS_SCALES:
        x = tl.minimum(tl.maximum(x / scale, -LARGEST), LARGEST)
    return x.to(cache.dtype.element_ty)


@triton.jit
def _kernel(
    qkv, cos, sin, q_weight, k_weight, scales, slots, cache, q_out,
    num_tokens, eps, clip, qkv_stride, page_stride, kv_stride, head_stride, slot_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, R: tl.constexpr, R_PAD: tl.constexpr,
    REST_PAD: tl.constexpr, PAGE: tl.constexpr, NORM: tl.constexpr, PLUS_ONE: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    HAS_CLIP: tl.constexpr, HAS_SCALES: tl.constexpr, LARGEST: tl.constexpr, INTERLEAVED: tl.constexpr,
    BT: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """NORM: 0 none, 1 RMS, 2 layer. Dims [0, R) and [R, 2R) rotate (interleaved: even and odd ones below 2R)."""
    ROWS: tl.constexpr = HEADS * (GROUP + 2)
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    row = tl.program_id(1) * BH + tl.arange(0, BH)
    head, part = row // (GROUP + 2), row % (GROUP + 2)
    live = ((token < num_tokens)[:, None] & (row < ROWS)[None, :])[:, :, None]
    is_k = (part == GROUP)[None, :]
    is_v = (part == GROUP + 1)[None, :, None]
    pair = tl.arange(0, R_PAD)
    extra = 2 * R + tl.arange(0, REST_PAD)
    pair_there, extra_there = live & (pair < R)[None, None, :], live & (extra < D)[None, None, :]
    base = token[:, None, None].to(tl.int64) * qkv_stride + row[None, :, None] * D
    if INTERLEAVED:
        both = tl.arange(0, 2 * R_PAD)[None, None, :]
        x = tl.load(qkv + base + both, mask=live & (both < 2 * R), other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(x, [BT, BH, R_PAD, 2]))
    else:
        first = tl.load(qkv + base + pair[None, None, :], mask=pair_there, other=0.0).to(tl.float32)
        second = tl.load(qkv + base + R + pair[None, None, :], mask=pair_there, other=0.0).to(tl.float32)
    rest = tl.load(qkv + base + extra[None, None, :], mask=extra_there, other=0.0).to(tl.float32)
    if HAS_CLIP:
        first = tl.clamp(first, -clip, clip, propagate_nan=tl.PropagateNan.ALL)
        second = tl.clamp(second, -clip, clip, propagate_nan=tl.PropagateNan.ALL)
        rest = tl.clamp(rest, -clip, clip, propagate_nan=tl.PropagateNan.ALL)
    new_first, new_second, new_rest = first, second, rest
    first_dim = 2 * pair if INTERLEAVED else pair
    second_dim = first_dim + 1 if INTERLEAVED else pair + R
    if NORM > 0:
        mean, square = _moments(first, second, rest, pair_there, pair_there, extra_there, D, NORM)
        inverse = tl.rsqrt(square + eps)
        new_first = _scaled(first, mean, inverse, q_weight, k_weight, first_dim, pair < R, is_k, PLUS_ONE, HAS_WEIGHT)
        new_second = _scaled(
            second, mean, inverse, q_weight, k_weight, second_dim, pair < R, is_k, PLUS_ONE, HAS_WEIGHT
        )
        new_rest = _scaled(rest, mean, inverse, q_weight, k_weight, extra, extra < D, is_k, PLUS_ONE, HAS_WEIGHT)
    if R > 0:
        at = token[:, None] * R + pair[None, :]
        turn_there = (token < num_tokens)[:, None] & (pair < R)[None, :]
        cos_BR = tl.load(cos + at, mask=turn_there, other=0.0).to(tl.float32)[:, None, :]
        sin_BR = tl.load(sin + at, mask=turn_there, other=0.0).to(tl.float32)[:, None, :]
        turned = new_first * cos_BR - new_second * sin_BR
        new_second = new_second * cos_BR + new_first * sin_BR
        new_first = turned
    first = tl.where(is_v, first, new_first)
    second = tl.where(is_v, second, new_second)
    rest = tl.where(is_v, rest, new_rest)

    is_q = (part < GROUP)[None, :, None]
    q_head = head * GROUP + part
    q_base = (token[:, None, None].to(tl.int64) * (HEADS * GROUP) + q_head[None, :, None]) * D
    slot = tl.load(slots + token, mask=token < num_tokens, other=-1).to(tl.int64)
    kept = (slot >= 0)[:, None, None] & (part >= GROUP)[None, :, None]
    c_base = ((slot // PAGE) * page_stride + (slot % PAGE) * slot_stride)[:, None, None]
    c_base += ((part == GROUP + 1) * kv_stride + head * head_stride)[None, :, None]
    scale = tl.full([1, BH, 1], 1.0, tl.float32)
    if HAS_SCALES:
        of_row = (part == GROUP + 1) * HEADS + head
        scale = tl.load(scales + of_row, mask=(row < ROWS) & (part >= GROUP), other=1.0)[None, :, None]
    if R > 0:
        if INTERLEAVED:
            x = tl.reshape(tl.join(first, second), [BT, BH, 2 * R_PAD])
            both_there = live & (both < 2 * R)
            tl.store(q_out + q_base + both, x.to(q_out.dtype.element_ty), mask=both_there & is_q)
            tl.store(cache + c_base + both, _stored(x, cache, scale, HAS_SCALES, LARGEST), mask=both_there & kept)
        else:
            at3 = pair[None, None, :]
            tl.store(q_out + q_base + at3, first.to(q_out.dtype.element_ty), mask=pair_there & is_q)
            tl.store(q_out + q_base + R + at3, second.to(q_out.dtype.element_ty), mask=pair_there & is_q)
            first = _stored(first, cache, scale, HAS_SCALES, LARGEST)
            second = _stored(second, cache, scale, HAS_SCALES, LARGEST)
            tl.store(cache + c_base + at3, first, mask=pair_there & kept)
            tl.store(cache + c_base + R + at3, second, mask=pair_there & kept)
    if 2 * R < D:
        at3 = extra[None, None, :]
        tl.store(q_out + q_base + at3, rest.to(q_out.dtype.element_ty), mask=extra_there & is_q)
        rest = _stored(rest, cache, scale, HAS_SCALES, LARGEST)
        tl.store(cache + c_base + at3, rest, mask=extra_there & kept)


NORMS = {"none": 0, "rms": 1, "layer": 2}


def qkv_cache(
    qkv: Tensor,
    cache: Tensor,
    slots_T: Tensor,
    cos_TR: Tensor | None = None,
    sin_TR: Tensor | None = None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    norm: str = "none",
    eps: float = 1e-6,
    plus_one: bool = False,
    interleaved: bool = False,
    clip: float | None = None,
    scales_2K: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `armillary.kernels.qkv_cache.qkv_cache`."""
    q = _qkv_cache(qkv, cache, slots_T, cos_TR, sin_TR, q_weight, k_weight, scales_2K, NORMS[norm], eps, plus_one,
                   interleaved, clip or 0.0)  # fmt: skip
    return q, cache


@torch.library.custom_op("armillary::qkv_cache", mutates_args=("cache",))
def _qkv_cache(
    qkv: Tensor,
    cache: Tensor,
    slots: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    scales: Tensor | None,
    norm: int,
    eps: float,
    plus_one: bool,
    interleaved: bool,
    clip: float,
) -> Tensor:
    tokens, heads, size = qkv.shape[0], cache.shape[2], cache.shape[4]
    group = qkv.shape[1] // (heads * size) - 2
    q = torch.empty(tokens, heads * group, size, dtype=qkv.dtype, device=qkv.device)
    if not tokens:
        return q
    turns = cos.shape[-1] if cos is not None else 0
    bh = min(_HEADS, power_of_two(heads * (group + 2)))
    bt = 2 if tokens >= _MANY_TOKENS else 1
    pointers = [qkv, *(qkv if x is None else x.contiguous() for x in (cos, sin, q_weight, k_weight, scales))]
    with on(qkv):
        _kernel[(ceil_div(tokens, bt), ceil_div(heads * (group + 2), bh))](
            *pointers, slots, cache, q, tokens, eps, clip, qkv.stride(0), *cache.stride()[:4],
            HEADS=heads, GROUP=group, D=size, R=turns, R_PAD=power_of_two(max(1, turns)),
            REST_PAD=power_of_two(max(1, size - 2 * turns)), PAGE=cache.shape[3], NORM=norm, PLUS_ONE=plus_one,
            HAS_WEIGHT=q_weight is not None, HAS_CLIP=clip > 0, HAS_SCALES=scales is not None, LARGEST=_FP8_MAX,
            INTERLEAVED=interleaved and turns > 0, BT=bt, BH=bh, num_warps=4,
        )  # fmt: skip
    return q


@_qkv_cache.register_fake
def _(qkv, cache, slots, cos, sin, q_weight, k_weight, scales, norm, eps, plus_one, interleaved, clip):
    heads, size = cache.shape[2], cache.shape[4]
    return qkv.new_empty(qkv.shape[0], qkv.shape[1] // size - 2 * heads, size)
