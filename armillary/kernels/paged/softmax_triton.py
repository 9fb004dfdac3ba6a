"""Shared by the paged kernels: masked scores of a tile of keys, the online softmax, and the sum of partial softmaxes.

Scores are in base 2. Their scale factor is applied where the maximum is subtracted: one operation for both.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# M rows (query, head of the group), R of them at a time, N keys of a tile, D head dim


@triton.jit
def first_key(position, WINDOW: tl.constexpr, CHUNKED: tl.constexpr):
    """The first key that a query at `position` sees: that of its window, or of its chunk of WINDOW tokens."""
    if WINDOW == 0:
        return position * 0
    elif CHUNKED:
        return position - position % WINDOW
    else:
        return tl.maximum(position - WINDOW + 1, 0)


@triton.jit
def places_of(tile, lowest, length, N: tl.constexpr, PAGE: tl.constexpr):
    """Positions of a tile's keys in their pages. Keys outside [lowest, length) are replaced by the nearest inside, so
    that nothing that a sequence does not own is read."""
    key = tl.minimum(tl.maximum(tile * N + tl.arange(0, N), lowest), tl.maximum(length - 1, 0))
    return key % PAGE


@triton.jit
def pages_of(table, tile, stop, lowest, length, N: tl.constexpr, PAGE: tl.constexpr):
    """Pages of a tile's keys: one number where a tile never crosses a page, else one per key; 0 where there are
    none."""
    there = (tile < stop) & (length > 0)
    if PAGE % N == 0:
        return tl.load(table + tile * N // PAGE, mask=there, other=0).to(tl.int64)
    else:
        key = tl.minimum(tl.maximum(tile * N + tl.arange(0, N), lowest), tl.maximum(length - 1, 0))
        return tl.load(table + key // PAGE, mask=there, other=0).to(tl.int64)


@triton.jit
def positive(scale):
    """A head of zeros has a scale of 0, and 0 · -inf of a masked key would be NaN: the smallest positive number
    instead."""
    return tl.maximum(scale, 1e-30, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def softcapped(scores, cap):
    """cap · tanh(scores / cap), by an exponential that cannot overflow."""
    grown = tl.exp(-2.0 * tl.abs(scores) / cap)
    size = cap * (1.0 - grown) / (1.0 + grown)
    return tl.where(scores < 0, -size, tl.where(scores == scores, size, scores))


@triton.jit
def scores_of(
    q_MD,
    k_ND,
    factor,
    cap,
    slope,
    key,
    position,
    there,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """(scores, their factor); -inf where a query must not see a key. `cap` and `slope` are in base 2."""
    scores = tl.dot(q_MD, tl.trans(k_ND.to(q_MD.dtype)), input_precision=PRECISION)
    if HAS_CAP:
        scores, factor = softcapped(scores * factor, cap), 1.0
    if HAS_SLOPES:
        scores = scores * factor + slope[:, None] * (key[None, :] - position[:, None]).to(tl.float32)
        factor = 1.0
    if MASKED:
        seen = there[None, :] & (key[None, :] <= position[:, None])
        if WINDOW > 0:
            seen = seen & (key[None, :] >= first_key(position, WINDOW, CHUNKED)[:, None])
        scores = tl.where(seen, scores, float("-inf"))
    return scores, factor


@triton.jit
def weighed(top, total, scores, factor, MASKED: tl.constexpr, LATE: tl.constexpr):
    """(largest score, sum of weights) with one more tile, its weights, and the rescaling of earlier ones. LATE: weights
    are added up over tiles only, [M, N], because a sum over keys is a sum over warps where rows are few."""
    new_top = tl.maximum(top, tl.max(scores, 1) * factor)
    safe = tl.where(new_top == float("-inf"), 0.0, new_top) if MASKED else new_top
    weights = tl.exp2(scores * factor - safe[:, None])
    rescale = tl.exp2(top - safe)
    total = total * rescale[:, None] + weights if LATE else total * rescale + tl.sum(weights, 1)
    return new_top, total, weights, rescale


@triton.jit
def absorbed(
    top,
    total,
    sums,
    scores,
    factor,
    v_ND,
    kind: tl.constexpr,
    MASKED: tl.constexpr,
    LATE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """(largest score, sum of weights, weighted values) with one more tile; MMAs are of dtype `kind`."""
    top, total, weights, rescale = weighed(top, total, scores, factor, MASKED, LATE)
    sums = tl.dot(weights.to(kind), v_ND.to(kind), sums * rescale[:, None], input_precision=PRECISION)
    return top, total, sums


@triton.jit
def finished(top, total, sums, sinks, q_head, used, v_scale, HAS_SINKS: tl.constexpr):
    """Weighted values over the sum of weights, to which a sink adds; zeros where no key was visible, because the
    stand-ins for absent keys may be anything."""
    seen = (total != 0.0)[:, None]  # not by `top`: a maximum ignores NaN, a sum does not
    if HAS_SINKS:
        sink = tl.load(sinks + q_head, mask=used, other=float("-inf")).to(tl.float32) * 1.4426950408889634
        high = tl.maximum(top, sink)
        high = tl.where(high == float("-inf"), 0.0, high)
        shrink = tl.exp2(top - high)
        total = total * shrink + tl.exp2(sink - high)
        sums = sums * shrink[:, None]
    return tl.where(seen, sums * (v_scale / tl.where(total == 0.0, 1.0, total))[:, None], 0.0)


@triton.jit
def combine(
    partial,
    peaks,
    shared,
    sinks,
    scales,
    out,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    M: tl.constexpr,
    R: tl.constexpr,
    PARTS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Partial softmaxes of workers that share a (sequence, KV head), added up in a fixed order. Program (worker, R rows
    of the tile): the sum of the partial results that begin with this worker's. The last worker to arrive could do it
    as well, by a counter; on an H200 that was slower (benchmarks/)."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    worker = tl.program_id(0)
    about = shared + worker * 5
    num_parts, first_slot, begin = tl.load(about), tl.load(about + 1), tl.load(about + 2)
    count, head = tl.load(about + 3), tl.load(about + 4)
    if num_parts == 0:
        return
    LOG2E: tl.constexpr = 1.4426950408889634
    row, dim = tl.program_id(1) * R + tl.arange(0, R), tl.arange(0, D_PAD)
    used = row // GROUP < count
    q_head = head * GROUP + row % GROUP
    top = tl.full([R], float("-inf"), tl.float32)
    total = tl.zeros([R], tl.float32)
    if HAS_SINKS:
        top = tl.load(sinks + q_head, mask=used, other=float("-inf")).to(tl.float32) * LOG2E
        total = tl.where(top > float("-inf"), 1.0, 0.0)
    sums = tl.zeros([R, D_PAD], tl.float32)
    for base in range(0, num_parts, PARTS):
        number = base + tl.arange(0, PARTS)
        there = (number < num_parts)[:, None] & used[None, :]
        slot = tl.where(number == 0, first_slot, 2 * (worker + number))
        at = slot[:, None] * M + row[None, :]
        values = tl.load(partial + at[:, :, None] * D_PAD + dim[None, None, :], mask=there[:, :, None], other=0.0)
        at += slot[:, None] * M
        tops = tl.load(peaks + at, mask=there, other=float("-inf"))
        totals = tl.load(peaks + at + M, mask=there, other=0.0)
        new_top = tl.maximum(top, tl.max(tops, 0))
        safe = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(tops - safe[None, :])
        rescale = tl.exp2(top - safe)
        sums = sums * rescale[:, None] + tl.sum(values * weight[:, :, None], 0)
        total = total * rescale + tl.sum(totals * weight, 0)
        top = new_top
    v_scale = tl.load(scales + HEADS + head) if HAS_SCALES else 1.0
    sums = sums * (v_scale / tl.where(total == 0.0, 1.0, total))[:, None]
    o_at = (begin + row // GROUP)[:, None].to(tl.int64) * (HEADS * GROUP * D) + q_head[:, None] * D + dim[None, :]
    tl.store(out + o_at, sums.to(out.dtype.element_ty), mask=used[:, None] & (dim < D)[None, :])
