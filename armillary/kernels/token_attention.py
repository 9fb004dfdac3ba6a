"""One token of each of a few sequences, from the fused projection to attention in one launch: QK norm, rotary
positions, cache write and attention over pages.

A program takes one sequence and KV head: it turns its queries and key, goes over the past keys, adds the new one, which
it has in registers, and writes that to its page. Past keys of long texts are shared by several programs; the one that
ends last adds their parts up, always in the same order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from armillary.kernels.launch import can_start_early, early_launch, on, power_of_two
from armillary.kernels.paged_attention import PagedBatch, PagedOptions
from armillary.kernels.qkv_cache import QkvOptions

# T tokens (one a sequence), K KV heads, M query heads of a KV head (padded), N keys of a tile, R half of the head dim

_PARTS, _LEAST, _TILE = 16, 4, 64
"""programs that share a text at most, key tiles of each at least, keys of a tile"""


def fits(cache: Tensor, options: PagedOptions, heads: QkvOptions, rotated: int) -> bool:
    """Whether the kernel knows all that a layer asks for."""
    plain = options.window is None and options.softcap is None and options.sinks_N is None and options.slopes_N is None
    size = cache.shape[4]
    return (plain and heads.clip is None and not heads.interleaved and heads.scales_2K is None
            and cache.dtype in (torch.bfloat16, torch.float16, torch.float32)
            and heads.norm in ("none", "rms") and _by_head(heads.q_weight, size) and _by_head(heads.k_weight, size)
            and rotated == size and size >= 32 and size == power_of_two(size))  # fmt: skip


def _by_head(weight: Tensor | None, size: int) -> bool:
    return weight is None or weight.numel() == size


def token_attention(
    qkv: Tensor, cache: Tensor, slots_T: Tensor, cos_TR: Tensor, sin_TR: Tensor, heads: QkvOptions,
    batch: PagedBatch, options: PagedOptions, arrived: Tensor,
) -> Tensor:  # fmt: skip
    """out [T, N·D] as `qkv_cache` and `paged_attention` give it for one token of each sequence. `arrived` is int32,
    zero, a number for each (sequence, KV head) at least, and is zero again afterwards."""
    rows, (num_heads, page, size) = len(qkv), cache.shape[2:]
    group = qkv.shape[1] // (num_heads * size) - 2
    out = torch.empty(rows, num_heads * group * size, dtype=qkv.dtype, device=qkv.device)
    padded = max(16, power_of_two(group))
    partial = torch.empty(rows * num_heads * _PARTS * padded * (size + 2), dtype=torch.float32, device=qkv.device)
    early = can_start_early(qkv.device)
    with on(qkv):
        token_kernel[(rows, num_heads, _PARTS)](
            qkv, cos_TR, sin_TR, heads.q_weight, heads.k_weight, slots_T, cache, batch.tables_BP, batch.lengths_B, out,
            partial, arrived, heads.eps, options.scale, batch.tables_BP.stride(0), cache.stride(0), cache.stride(1),
            cache.stride(2), HEADS=num_heads, GROUP=group, M=padded, R=size // 2, PAGE=page, N=_TILE,
            NORM=heads.norm == "rms", Q_WEIGHT=heads.q_weight is not None, K_WEIGHT=heads.k_weight is not None,
            PLUS_ONE=heads.plus_one, PARTS=_PARTS, LEAST=_LEAST, EARLY=early,
            PRECISION="tf32x3" if qkv.dtype == torch.float32 else "tf32", num_warps=4, **early_launch(early),
        )  # fmt: skip
    return out


@triton.jit
def _turned(first, second, weight, cos, sin, eps, R: tl.constexpr, NORM: tl.constexpr, WEIGHT: tl.constexpr,
            PLUS_ONE: tl.constexpr):  # fmt: skip
    """Rows in two halves [M, R], normed and turned."""
    if NORM:
        inverse = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * R) + eps)[:, None]
        first, second = first * inverse, second * inverse
    if WEIGHT:
        dim = tl.arange(0, R)
        a, b = tl.load(weight + dim).to(tl.float32)[None, :], tl.load(weight + R + dim).to(tl.float32)[None, :]
        if PLUS_ONE:
            a, b = a + 1.0, b + 1.0
        first, second = first * a, second * b
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _added(top, total, sums, partial, slot, parts, m_row, dim, M: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr):
    """The parts of all programs, one after the other; this one's own values are among them."""
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    sums = tl.zeros([M, D], tl.float32)
    for part in range(parts):
        at = partial + (slot + part).to(tl.int64) * (M * (D + 2))
        new_top = tl.load(at + M * D + m_row, volatile=True)
        new_total = tl.load(at + M * (D + 1) + m_row, volatile=True)
        new_sums = tl.load(at + m_row[:, None] * D + dim[None, :], volatile=True)
        high = tl.maximum(top, new_top)
        old_share, new_share = tl.exp2(top - high), tl.exp2(new_top - high)
        total = total * old_share + new_total * new_share
        sums = sums * old_share[:, None] + new_sums * new_share[:, None]
        top = high
    return top, total, sums


@triton.jit
def token_kernel(
    qkv, cos, sin, q_weight, k_weight, slots, cache, tables, lengths, out, partial, arrived,
    eps, scale, table_stride, page_stride, kv_stride, head_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, R: tl.constexpr, PAGE: tl.constexpr, N: tl.constexpr,
    NORM: tl.constexpr, Q_WEIGHT: tl.constexpr, K_WEIGHT: tl.constexpr, PLUS_ONE: tl.constexpr,
    PARTS: tl.constexpr, LEAST: tl.constexpr, EARLY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (sequence, KV head, part of its past)."""
    LOG2E: tl.constexpr = 1.4426950408889634
    D: tl.constexpr = 2 * R
    b, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if EARLY:
        gdc_launch_dependents()
    past = tl.load(lengths + b) - 1
    tiles = (past + N - 1) // N
    parts = tl.minimum(tl.maximum(tiles // LEAST, 1), PARTS)
    if part >= parts:
        return
    dim, half, m_row = tl.arange(0, D), tl.arange(0, R), tl.arange(0, M)
    used = m_row < GROUP
    o_at = out + (b * (HEADS * GROUP) + head * GROUP + m_row[:, None]).to(tl.int64) * D + dim[None, :]
    if past < 0:  # padding
        if EARLY:
            gdc_wait()
        tl.store(o_at, tl.zeros([M, D], out.dtype.element_ty), mask=used[:, None])
        return
    table = tables + b.to(tl.int64) * table_stride
    keys = cache + head.to(tl.int64) * head_stride
    first_tile, end_tile = tiles * part // parts, tiles * (part + 1) // parts
    key = tl.minimum(first_tile * N + tl.arange(0, N), tl.maximum(past - 1, 0))
    page = tl.load(table + key // PAGE).to(tl.int64)
    if EARLY:
        gdc_wait()
    row = qkv + (b * (HEADS * (GROUP + 2)) + head * (GROUP + 2)).to(tl.int64) * D
    q_at = row + m_row[:, None] * D + half[None, :]
    cos_R, sin_R = tl.load(cos + b * R + half)[None, :], tl.load(sin + b * R + half)[None, :]
    q1 = tl.load(q_at, mask=used[:, None], other=0.0).to(tl.float32)
    q2 = tl.load(q_at + R, mask=used[:, None], other=0.0).to(tl.float32)
    q1, q2 = _turned(q1, q2, q_weight, cos_R, sin_R, eps, R, NORM, Q_WEIGHT, PLUS_ONE)
    kind: tl.constexpr = qkv.dtype.element_ty
    q1, q2 = q1.to(kind), q2.to(kind)
    factor = scale * LOG2E
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    sums = tl.zeros([M, D], tl.float32)
    for tile in range(first_tile, end_tile):
        key = tile * N + tl.arange(0, N)
        next_key = tl.minimum(key + N, tl.maximum(past - 1, 0))
        next_page = tl.load(table + next_key // PAGE).to(tl.int64)
        at = keys + page * page_stride + (tl.minimum(key, past - 1) % PAGE) * D
        k1 = tl.load(at[:, None] + half[None, :])
        k2 = tl.load(at[:, None] + R + half[None, :])
        v = tl.load(at[:, None] + kv_stride + dim[None, :])
        scores = tl.dot(q1, tl.trans(k1), input_precision=PRECISION)
        scores = tl.dot(q2, tl.trans(k2), scores, input_precision=PRECISION) * factor
        scores = tl.where((key < past)[None, :], scores, float("-inf"))
        high = tl.maximum(top, tl.max(scores, 1))
        weights, keep = tl.exp2(scores - high[:, None]), tl.exp2(top - high)
        total = total * keep + tl.sum(weights, 1)
        sums = tl.dot(weights.to(kind), v, sums * keep[:, None], input_precision=PRECISION)
        top, page = high, next_page
    if part == parts - 1:  # the new token: in registers here, and in its page for those to come
        at = row + GROUP * D + half[None, :]
        n1, n2 = tl.load(at).to(tl.float32), tl.load(at + R).to(tl.float32)
        n1, n2 = _turned(n1, n2, k_weight, cos_R, sin_R, eps, R, NORM, K_WEIGHT, PLUS_ONE)
        n1, n2, new_v = n1.to(kind), n2.to(kind), tl.load(row + (GROUP + 1) * D + dim)
        slot = tl.load(slots + b).to(tl.int64)
        place = keys + slot // PAGE * page_stride + slot % PAGE * D
        tl.store(place + half[None, :], n1.to(cache.dtype.element_ty), mask=slot >= 0)
        tl.store(place + R + half[None, :], n2.to(cache.dtype.element_ty), mask=slot >= 0)
        tl.store(place + kv_stride + dim, new_v.to(cache.dtype.element_ty), mask=slot >= 0)
        score = tl.sum(q1.to(tl.float32) * n1.to(tl.float32), 1) + tl.sum(q2.to(tl.float32) * n2.to(tl.float32), 1)
        score = score * factor
        high = tl.maximum(top, score)
        weight, keep = tl.exp2(score - high), tl.exp2(top - high)
        total = total * keep + weight
        sums = sums * keep[:, None] + weight[:, None] * new_v.to(tl.float32)[None, :]
        top = high
    if parts > 1:
        slot_0 = (b * HEADS + head) * PARTS
        at = partial + (slot_0 + part).to(tl.int64) * (M * (D + 2))
        tl.store(at + m_row[:, None] * D + dim[None, :], sums)
        tl.store(at + M * D + m_row, top)
        tl.store(at + M * (D + 1) + m_row, total)
        tl.debug_barrier()
        before = tl.atomic_add(arrived + b * HEADS + head, 1, sem="acq_rel")
        if before < parts - 1:
            return
        tl.atomic_xchg(arrived + b * HEADS + head, 0)
        top, total, sums = _added(top, total, sums, partial, slot_0, parts, m_row, dim, M, D, PARTS)
    tl.store(o_at, (sums / total[:, None]).to(out.dtype.element_ty), mask=used[:, None])
