"""From the fused projection through attention for the one new token of a few sequences: two launches instead of three.

Programs are set up while the projection still runs: they read lengths, tables, angles, and the first tile of keys and
values of the past, which earlier steps have written, and only then wait for the new token. What has to be done between
the projection and the next product is short then: QK norm, rotary positions, one tile, and a sum over programs that
shared a sequence. Those who call it see to it that lengths, tables, slots, cos and sin were there before the kernel
ahead began.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from armillary.kernels.launch import can_start_early, early_launch, on, power_of_two
from armillary.kernels.paged_attention import PagedBatch, PagedOptions
from armillary.kernels.paged_token import attend_tokens as reference
from armillary.kernels.paged_token import plain
from armillary.kernels.qkv_cache import QkvOptions

# M query heads of a KV head, padded; N keys of a tile; D head dim, R = D / 2 dims that turn with R others

_PROGRAMS, _MOST_SPLITS = 128, 32
"""of the first launch, at most; those that share a sequence and KV head, at most"""
_KEYS, _WARPS = 64, 4
"""of a tile, of a program"""


def attend_tokens(
    qkv: Tensor, cache: Tensor, slots_T: Tensor, cos_TR: Tensor | None, sin_TR: Tensor | None, heads: QkvOptions,
    batch: PagedBatch, options: PagedOptions,
) -> Tensor:  # fmt: skip
    """See `armillary.kernels.paged_token.attend_tokens`; what is not plain goes to the reference."""
    if not plain(qkv, cache, cos_TR, heads, batch, options):
        return reference(qkv, cache, slots_T, cos_TR, sin_TR, heads, batch, options)
    qkv = qkv if qkv.stride(1) == 1 else qkv.contiguous()
    rows, kv_heads, size = len(qkv), cache.shape[2], cache.shape[4]
    group = qkv.shape[1] // (kv_heads * size) - 2
    splits, m = num_splits(rows * kv_heads), max(16, power_of_two(group))
    out = qkv.new_empty(rows, kv_heads * group * size)
    programs = rows * kv_heads * splits
    partial = torch.empty(programs * m * size, dtype=torch.float32, device=qkv.device)
    peaks = torch.empty(programs * 2 * m, dtype=torch.float32, device=qkv.device)
    tables = batch.tables_BP if batch.tables_BP.stride(1) == 1 else batch.tables_BP.contiguous()
    cos_TR, sin_TR, slots_T, lengths_B = (x.contiguous() for x in (cos_TR, sin_TR, slots_T, batch.lengths_B))  # type: ignore[union-attr]
    early = can_start_early(qkv.device)
    normed = heads.norm == "rms"
    q_weight, k_weight = (heads.q_weight, heads.k_weight) if normed else (qkv, qkv)
    with on(qkv):
        attend[(programs,)](
            qkv, cos_TR, sin_TR, q_weight, k_weight, slots_T, tables, lengths_B, cache, partial, peaks,
            options.scale, heads.eps, qkv.stride(0), *cache.stride()[:4], tables.stride(0),
            HEADS=kv_heads, GROUP=group, R=size // 2, PAGE=cache.shape[3], SPLITS=splits, NORM=normed,
            PLUS_ONE=heads.plus_one, M=m, N=_KEYS if size <= 128 else 32, EARLY=early, num_warps=_WARPS,
            **early_launch(early),
        )  # fmt: skip
        join[(rows * kv_heads * group,)](
            partial, peaks, out, GROUP=group, D=size, SPLITS=splits, M=m, EARLY=early, num_warps=4,
            **early_launch(early),
        )  # fmt: skip
    return out


def num_splits(pairs: int) -> int:
    """Programs that share a sequence and KV head, a power of two: so many that all of them are about _PROGRAMS."""
    return max(1, min(_MOST_SPLITS, power_of_two(_PROGRAMS // pairs + 1) // 2))


@triton.jit
def _tile(cache, table, tile, stop, past, page_stride, kv_stride, slot_stride, R: tl.constexpr, PAGE: tl.constexpr,
          N: tl.constexpr):  # fmt: skip
    """Keys of a tile as the halves that turn with each other, values, and which are there. Past L1: each is read once,
    and may have been written since this kernel began."""
    key = tile * N + tl.arange(0, N)
    there = (key < past) & (tile < stop)
    page = tl.load(table + key // PAGE, mask=there, other=0, cache_modifier=".cg").to(tl.int64)
    rows = cache + (page * page_stride + (key % PAGE) * slot_stride)[:, None]
    half, dim = tl.arange(0, R)[None, :], tl.arange(0, 2 * R)[None, :]
    first = tl.load(rows + half, mask=there[:, None], other=0.0, cache_modifier=".cg")
    second = tl.load(rows + R + half, mask=there[:, None], other=0.0, cache_modifier=".cg")
    values = tl.load(rows + kv_stride + dim, mask=there[:, None], other=0.0, cache_modifier=".cg")
    return first, second, values, there


@triton.jit
def _halves(weight, R: tl.constexpr, NORM: tl.constexpr, PLUS_ONE: tl.constexpr):
    """The norm's weights for dims that turn with each other."""
    if NORM:
        half, more = tl.arange(0, R)[None, :], 1.0 if PLUS_ONE else 0.0
        return tl.load(weight + half).to(tl.float32) + more, tl.load(weight + R + half).to(tl.float32) + more
    else:
        return 1.0, 1.0


@triton.jit
def _turned(first, second, weights, cos, sin, eps, R: tl.constexpr, NORM: tl.constexpr):
    """Rows [., R] twice after norm and rotation, in fp32."""
    first, second = first.to(tl.float32), second.to(tl.float32)
    if NORM:
        inverse = tl.rsqrt(tl.sum(first * first + second * second, 1) / (2 * R) + eps)[:, None]
        first, second = first * inverse * weights[0], second * inverse * weights[1]
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _more(top, total, sums, q_first, q_second, k_first, k_second, values, there, factor):
    """(largest score, sum of weights, weighted values) with one more tile."""
    scores = tl.dot(q_first, tl.trans(k_first), input_precision="tf32x3")
    scores = tl.dot(q_second, tl.trans(k_second), scores, input_precision="tf32x3")
    scores = tl.where(there[None, :], scores * factor, float("-inf"))
    high = tl.maximum(top, tl.max(scores, 1))
    safe = tl.where(high == float("-inf"), 0.0, high)
    weights, keep = tl.exp2(scores - safe[:, None]), tl.exp2(top - safe)
    sums = tl.dot(weights.to(values.dtype), values, sums * keep[:, None], input_precision="tf32x3")
    return high, total * keep + tl.sum(weights, 1), sums


@triton.jit
def attend(
    qkv, cos, sin, q_weight, k_weight, slots, tables, lengths, cache, partial, peaks,
    scale, eps, qkv_stride, page_stride, kv_stride, head_stride, slot_stride, table_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, R: tl.constexpr, PAGE: tl.constexpr, SPLITS: tl.constexpr,
    NORM: tl.constexpr, PLUS_ONE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (sequence, KV head, split): some tiles of the past. Split 0 has the new token too, the last one, which
    has least to do, writes it."""
    if EARLY:
        gdc_launch_dependents()
    D: tl.constexpr = 2 * R
    split, head = tl.program_id(0) % SPLITS, tl.program_id(0) // SPLITS % HEADS
    b = (tl.program_id(0) // (SPLITS * HEADS)).to(tl.int64)
    half, dim, member = tl.arange(0, R), tl.arange(0, D), tl.arange(0, M)
    length = tl.load(lengths + b, cache_modifier=".cg")
    past = tl.maximum(length - 1, 0)
    tiles = (past + N - 1) // N
    per = (tiles + SPLITS - 1) // SPLITS
    begin, stop = split * per, tl.minimum((split + 1) * per, tiles)
    table, of_head = tables + b * table_stride, cache + head.to(tl.int64) * head_stride
    k_first, k_second, values, there = _tile(of_head, table, begin, stop, past, page_stride, kv_stride, slot_stride, R,
                                             PAGE, N)  # fmt: skip
    c = tl.load(cos + b * R + half, cache_modifier=".cg").to(tl.float32)[None, :]
    s = tl.load(sin + b * R + half, cache_modifier=".cg").to(tl.float32)[None, :]
    slot = tl.load(slots + b, cache_modifier=".cg").to(tl.int64)
    q_weights, k_weights = _halves(q_weight, R, NORM, PLUS_ONE), _halves(k_weight, R, NORM, PLUS_ONE)
    if EARLY:
        gdc_wait()
    row = qkv + b * qkv_stride + head * ((GROUP + 2) * D)
    q_at = row + member[:, None] * D + half[None, :]
    own_at = row + GROUP * D + half[None, :]
    used = (member < GROUP)[:, None]
    own_value = tl.load(row + (GROUP + 1) * D + dim)
    q_first, q_second = tl.load(q_at, mask=used, other=0.0), tl.load(q_at + R, mask=used, other=0.0)
    own_first, own_second = tl.load(own_at), tl.load(own_at + R)
    q_first, q_second = _turned(q_first, q_second, q_weights, c, s, eps, R, NORM)
    own_first, own_second = _turned(own_first, own_second, k_weights, c, s, eps, R, NORM)
    kind = qkv.dtype.element_ty
    q_first, q_second = q_first.to(kind), q_second.to(kind)
    own_first, own_second = own_first.to(kind), own_second.to(kind)
    if (split == SPLITS - 1) & (slot >= 0):
        place = of_head + slot // PAGE * page_stride + slot % PAGE * slot_stride
        tl.store(place + half[None, :], own_first)
        tl.store(place + R + half[None, :], own_second)
        tl.store(place + kv_stride + dim, own_value)
    factor = scale * 1.4426950408889634
    own = tl.sum(q_first.to(tl.float32) * own_first.to(tl.float32)
                 + q_second.to(tl.float32) * own_second.to(tl.float32), 1) * factor  # fmt: skip
    top = tl.where((split == 0) & (length > 0), own, float("-inf"))
    weight = tl.where(top > float("-inf"), 1.0, tl.where(top == top, 0.0, top))
    total, sums = weight, weight[:, None] * own_value.to(tl.float32)[None, :]
    top, total, sums = _more(top, total, sums, q_first, q_second, k_first, k_second, values, there, factor)
    for tile in range(begin + 1, stop):
        k_first, k_second, values, there = _tile(of_head, table, tile, stop, past, page_stride, kv_stride, slot_stride,
                                                 R, PAGE, N)  # fmt: skip
        top, total, sums = _more(top, total, sums, q_first, q_second, k_first, k_second, values, there, factor)
    at = tl.program_id(0) * M + member
    tl.store(peaks + at * 2, top)
    tl.store(peaks + at * 2 + 1, total)
    tl.store(partial + at[:, None] * D + dim[None, :], sums, mask=used)


@triton.jit
def join(
    partial, peaks, out, GROUP: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr, M: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Program (sequence, query head): what the splits have, added up."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    number = tl.program_id(0)
    pair, member = number // GROUP, number % GROUP
    at = (pair * SPLITS + tl.arange(0, SPLITS)) * M + member
    dim = tl.arange(0, D)
    tops, totals = tl.load(peaks + at * 2), tl.load(peaks + at * 2 + 1)
    sums = tl.load(partial + at[:, None] * D + dim[None, :])
    top = tl.max(tops, 0)
    weights = tl.exp2(tops - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(weights * totals, 0)
    whole = tl.sum(weights[:, None] * sums, 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + number * D + dim, whole.to(out.dtype.element_ty))
