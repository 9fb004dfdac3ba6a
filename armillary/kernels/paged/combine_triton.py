"""Partial softmaxes of workers that share a (sequence, KV head), added up in a fixed order by a second launch.

The last worker to arrive could do it as well, by a counter; on an H200 that was slower (benchmarks/).
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# M rows (query, head of the group), R of them at a time, D head dim


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
    """Program (worker, R rows of the tile): the sum of the partial results that begin with this worker's."""
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
        keep = tl.exp2(top - safe)
        sums = sums * keep[:, None] + tl.sum(values * weight[:, :, None], 0)
        total = total * keep + tl.sum(totals * weight, 0)
        top = new_top
    v_scale = tl.load(scales + HEADS + head) if HAS_SCALES else 1.0
    sums = sums * (v_scale / tl.where(total == 0.0, 1.0, total))[:, None]
    o_at = (begin + row // GROUP)[:, None].to(tl.int64) * (HEADS * GROUP * D) + q_head[:, None] * D + dim[None, :]
    tl.store(out + o_at, sums.to(out.dtype.element_ty), mask=used[:, None] & (dim < D)[None, :])
