"""From the fused projection through attention for the one new token of a few sequences: two launches instead of three.

Programs start while the projection still runs: they read lengths, tables, cos and sin, and the first tile of earlier
keys and values, which earlier steps have written, and only then wait for the new token. What remains between the
projection and the next GEMM is short: QK norm, rotary positions, one tile, and a sum over programs that share a
sequence. The caller guarantees that lengths, tables, slots, cos and sin were written before the previous kernel began.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from armillary.kernels.attention.attention import AttentionOptions
from armillary.kernels.core.launch import can_start_early, dense, early_launch, on, power_of_two
from armillary.kernels.paged.paged_attention import PagedBatch
from armillary.kernels.paged.qkv_to_cache import QkvOptions, can_attend
from armillary.kernels.paged.qkv_to_cache import attend_tokens as reference
from armillary.kernels.paged.softmax_triton import first_key

# M query heads of a KV head, padded; N keys of a tile; D head dim

_MOST_SPLITS = 32  # programs that share a sequence and KV head, at most
_SHORT = 4096  # tokens of a table up to which a program has few tiles: one program per multiprocessor is then fastest


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
    """See `armillary.kernels.paged.qkv_to_cache.attend_tokens`; unsupported options go to the reference."""
    if not can_attend(qkv, cache, cos_TR, heads, batch, options):
        return reference(qkv, cache, slots_T, cos_TR, sin_TR, heads, batch, options)
    qkv = qkv if qkv.stride(1) == 1 else qkv.contiguous()
    rows, kv_heads, size = len(qkv), cache.shape[2], cache.shape[4]
    group = qkv.shape[1] // (kv_heads * size) - 2
    tokens = batch.tables_BP.shape[1] * cache.shape[3]
    (splits, keys), m = (
        tiling(rows * kv_heads, size * cache.element_size(), tokens, options.window or options.chunk),
        max(16, power_of_two(group)),
    )
    out = qkv.new_empty(rows, kv_heads * group * size)
    programs = rows * kv_heads * splits
    partial = torch.empty(programs * m * size, dtype=torch.float32, device=qkv.device)
    peaks = torch.empty(programs * 2 * m, dtype=torch.float32, device=qkv.device)
    tables = batch.tables_BP if batch.tables_BP.stride(1) == 1 else batch.tables_BP.contiguous()
    cos_TR, sin_TR, slots_T, lengths_B = map(dense, (cos_TR, sin_TR, slots_T, batch.lengths_B))
    early = can_start_early(qkv.device)
    with on(qkv):
        attend[(programs,)](
            qkv,
            cos_TR,
            sin_TR,
            dense(heads.q_weight),
            dense(heads.k_weight),
            dense(heads.q_scale_T),
            slots_T,
            tables,
            lengths_B,
            cache,
            partial,
            peaks,
            options.scale_for(cache.shape[4]),
            heads.eps,
            qkv.stride(0),
            *cache.stride()[:4],
            tables.stride(0),
            HEADS=kv_heads,
            GROUP=group,
            D=size,
            PAGE=cache.shape[3],
            SPLITS=splits,
            WINDOW=options.window or options.chunk,
            CHUNKED=options.chunk > 0,
            ROTATES=cos_TR is not None,
            INTERLEAVED=heads.interleaved,
            NORM=heads.norm == "rms",
            HAS_WEIGHT=heads.norm == "rms" and heads.q_weight is not None,
            PLUS_ONE=heads.plus_one,
            HAS_Q_SCALE=heads.q_scale_T is not None,
            M=m,
            N=keys,
            EARLY=early,
            num_warps=4,
            **early_launch(early),
        )
        join[(rows * kv_heads * group,)](
            partial,
            peaks,
            dense(options.sinks_N),
            out,
            HEADS=kv_heads,
            GROUP=group,
            D=size,
            SPLITS=splits,
            HAS_SINKS=options.sinks_N is not None,
            M=m,
            EARLY=early,
            num_warps=4,
            **early_launch(early),
        )
    return out


def tiling(sequence_heads: int, key_bytes: int, tokens: int, window: int = 0) -> tuple[int, int]:
    """Programs that share a sequence and KV head, a power of two, and keys per tile: on an H200 128 programs and tiles
    of 8 KB where tables are short, else twice as many and twice as large for more loads in flight. No more programs
    than a window has tiles."""
    tokens = min(tokens, window or tokens)
    more = 1 if tokens <= _SHORT else 2
    splits, keys = power_of_two(128 * more // sequence_heads + 1) // 2, max(16, min(64, 8192 * more // key_bytes))
    most = min(_MOST_SPLITS, power_of_two(window // keys + 2)) if window else _MOST_SPLITS
    return max(1, min(most, splits)), keys


@triton.jit
def _tile(
    cache,
    table,
    tile,
    stop,
    first,
    past,
    page_stride,
    kv_stride,
    slot_stride,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    N: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Keys and values of a tile, and which exist. Past L1: each is read once, and may have been written since this
    kernel began."""
    key = tile * N + tl.arange(0, N)
    there = (key < past) & (tile < stop)
    if WINDOW > 0:
        there = there & (key >= first)
    page = tl.load(table + key // PAGE, mask=there, other=0, cache_modifier=".cg").to(tl.int64)
    rows = cache + (page * page_stride + (key % PAGE) * slot_stride)[:, None] + tl.arange(0, D)[None, :]
    keys = tl.load(rows, mask=there[:, None], other=0.0, cache_modifier=".cg")
    return keys, tl.load(rows + kv_stride, mask=there[:, None], other=0.0, cache_modifier=".cg"), there


@triton.jit
def _weights(weight, dim, other, HAS_WEIGHT: tl.constexpr, PLUS_ONE: tl.constexpr):
    """The norm's weights, for dims and for their rotation partners."""
    if HAS_WEIGHT:
        more = 1.0 if PLUS_ONE else 0.0
        first, second = tl.load(weight + dim).to(tl.float32) + more, tl.load(weight + other).to(tl.float32) + more
        return first[None, :], second[None, :]
    else:
        return 1.0, 1.0


@triton.jit
def _rotated(x, rotated, weights, cos, sin, eps, D: tl.constexpr, NORM: tl.constexpr, ROTATES: tl.constexpr):
    """Rows [., D] in fp32, given each dim's rotation partner, after norm and rotation."""
    wide, rotated = x.to(tl.float32), rotated.to(tl.float32)
    if NORM:
        inverse = tl.rsqrt(tl.sum(wide * wide, 1) / D + eps)[:, None]
        wide, rotated = wide * inverse * weights[0], rotated * inverse * weights[1]
    return wide * cos + rotated * sin if ROTATES else wide


@triton.jit
def _more(top, total, sums, q, keys, values, there, factor):
    """(largest score, sum of weights, weighted values) with one more tile."""
    scores = tl.dot(q, tl.trans(keys), input_precision="tf32x3")
    scores = tl.where(there[None, :], scores * factor, float("-inf"))
    high = tl.maximum(top, tl.max(scores, 1))
    safe = tl.where(high == float("-inf"), 0.0, high)
    weights, rescale = tl.exp2(scores - safe[:, None]), tl.exp2(top - safe)
    sums = tl.dot(weights.to(values.dtype), values, sums * rescale[:, None], input_precision="tf32x3")
    return high, total * rescale + tl.sum(weights, 1), sums


@triton.jit
def attend(
    qkv,
    cos,
    sin,
    q_weight,
    k_weight,
    q_scale,
    slots,
    tables,
    lengths,
    cache,
    partial,
    peaks,
    scale,
    eps,
    qkv_stride,
    page_stride,
    kv_stride,
    head_stride,
    slot_stride,
    table_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    ROTATES: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    HAS_Q_SCALE: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (sequence, KV head, split): some tiles of earlier keys. Split 0 also has the new token; the last split,
    which has least to do, writes it."""
    if EARLY:
        gdc_launch_dependents()
    R: tl.constexpr = D // 2
    split, head = tl.program_id(0) % SPLITS, tl.program_id(0) // SPLITS % HEADS
    b = (tl.program_id(0) // (SPLITS * HEADS)).to(tl.int64)
    dim, member = tl.arange(0, D), tl.arange(0, M)
    other, angle, is_first = (dim + R) % D, dim % R, dim < R
    if INTERLEAVED:
        other, angle, is_first = dim ^ 1, dim // 2, dim % 2 == 0
    length = tl.load(lengths + b, cache_modifier=".cg")
    past = tl.maximum(length - 1, 0)
    first = first_key(past, WINDOW, CHUNKED)
    tiles = tl.maximum((past + N - 1) // N - first // N, 0)
    per = (tiles + SPLITS - 1) // SPLITS
    begin, stop = first // N + split * per, first // N + tl.minimum((split + 1) * per, tiles)
    table, of_head = tables + b * table_stride, cache + head.to(tl.int64) * head_stride
    keys, values, there = _tile(
        of_head, table, begin, stop, first, past, page_stride, kv_stride, slot_stride, D, PAGE, N, WINDOW
    )
    c, s = 1.0, 0.0
    if ROTATES:
        c = tl.load(cos + b * R + angle, cache_modifier=".cg").to(tl.float32)[None, :]
        s = tl.load(sin + b * R + angle, cache_modifier=".cg").to(tl.float32)
        s = tl.where(is_first, -s, s)[None, :]
    slot = tl.load(slots + b, cache_modifier=".cg").to(tl.int64)
    q_weights = _weights(q_weight, dim, other, HAS_WEIGHT, PLUS_ONE)
    k_weights = _weights(k_weight, dim, other, HAS_WEIGHT, PLUS_ONE)
    used = (member < GROUP)[:, None]
    if EARLY:
        gdc_wait()
    row = qkv + b * qkv_stride + head * ((GROUP + 2) * D)
    rows, own = row + member[:, None] * D, row + GROUP * D
    q = tl.load(rows + dim[None, :], mask=used, other=0.0)
    q_turned = tl.load(rows + other[None, :], mask=used, other=0.0)
    key, key_turned = tl.load(own + dim[None, :]), tl.load(own + other[None, :])
    value = tl.load(own + D + dim)
    q = _rotated(q, q_turned, q_weights, c, s, eps, D, NORM, ROTATES)
    if HAS_Q_SCALE:
        q = q * tl.load(q_scale + b).to(tl.float32)
    q = q.to(value.dtype)
    key = _rotated(key, key_turned, k_weights, c, s, eps, D, NORM, ROTATES).to(value.dtype)
    if (split == SPLITS - 1) & (slot >= 0):
        place = of_head + slot // PAGE * page_stride + slot % PAGE * slot_stride
        tl.store(place + dim[None, :], key)
        tl.store(place + kv_stride + dim, value)
    factor = scale * 1.4426950408889634
    top = tl.full([M], float("-inf"), tl.float32)
    if (split == 0) & (length > 0):
        top = tl.sum(q.to(tl.float32) * key.to(tl.float32), 1) * factor
    weight = tl.where(top > float("-inf"), 1.0, tl.where(top == top, 0.0, top))
    total, sums = weight, weight[:, None] * value.to(tl.float32)[None, :]
    top, total, sums = _more(top, total, sums, q, keys, values, there, factor)
    for tile in range(begin + 1, stop):
        keys, values, there = _tile(
            of_head, table, tile, stop, first, past, page_stride, kv_stride, slot_stride, D, PAGE, N, WINDOW
        )
        top, total, sums = _more(top, total, sums, q, keys, values, there, factor)
    at = tl.program_id(0) * M + member
    tl.store(peaks + at * 2, top)
    tl.store(peaks + at * 2 + 1, total)
    tl.store(partial + at[:, None] * D + dim[None, :], sums, mask=used)


@triton.jit
def join(
    partial,
    peaks,
    sinks,
    out,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    M: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (sequence, query head): the sum over splits; a sink adds to the sum of weights."""
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
    if HAS_SINKS:
        sink = tl.load(sinks + number % (HEADS * GROUP)).to(tl.float32) * 1.4426950408889634
        top = tl.maximum(top, sink)
    safe = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.exp2(tops - safe)
    total = tl.sum(weights * totals, 0)
    if HAS_SINKS:
        total += tl.exp2(sink - safe)
    result = tl.sum(weights[:, None] * sums, 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + number * D + dim, result.to(out.dtype.element_ty))
