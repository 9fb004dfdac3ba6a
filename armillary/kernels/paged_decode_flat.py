"""The split-KV kernel of `paged_decode` as one loop over all tiles of a worker, whatever sequences they belong to.

Loads of the next sequence begin while the last tiles of the one before are still being worked on, which counts where
contexts are short. To keep the loop free of searches, every sequence has at least one tile, also one that has no
queries for this kernel; such a tile reads and writes nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from armillary.kernels.paged_decode import pages_of, softcapped


@triton.jit
def _row(starts, lengths, b, num_rows, QUERIES: tl.constexpr):
    """First query, number of queries and keys of row b; none where it is not for this kernel."""
    there = b < num_rows
    begin = tl.load(starts + b, mask=there, other=0)
    count = tl.load(starts + b + 1, mask=there, other=0) - begin
    mine = (count > 0) & (count <= QUERIES)
    return begin, tl.where(mine, count, 0), tl.where(mine, tl.load(lengths + b, mask=there, other=0), 0)


@triton.jit
def _first_tile(count, length, N: tl.constexpr, WINDOW: tl.constexpr):
    return tl.maximum(length - count - WINDOW + 1, 0) // N if WINDOW > 0 else 0 * length


@triton.jit
def _start(starts, lengths, num_rows, worker, num_workers, N: tl.constexpr, WINDOW: tl.constexpr,
           QUERIES: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr):  # fmt: skip
    """Where a worker begins and stops: tiles, and the row, head and tile of the first."""
    row = tl.arange(0, ROWS)
    _, count, length = _row(starts, lengths, row, num_rows, QUERIES)
    first = _first_tile(count, length, N, WINDOW)
    tiles = tl.where(row < num_rows, tl.maximum((length + N - 1) // N - first, 1), 0)
    upto = tl.cumsum(tiles, 0)
    total = tl.max(upto, 0) * HEADS
    per = tl.maximum((total + num_workers - 1) // num_workers, 1)
    begin = worker * per
    b = tl.sum((upto * HEADS <= begin).to(tl.int32), 0)
    row_tiles = tl.maximum(tl.sum(tl.where(row == b, tiles, 0), 0), 1)
    inside = begin - tl.sum(tl.where(row == b, upto - tiles, 0), 0) * HEADS
    tile = tl.sum(tl.where(row == b, first, 0), 0) + inside % row_tiles
    return per, begin, tl.minimum(begin + per, total), b, inside // row_tiles, tile


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def decode_flat(
    q, cache, tables, starts, lengths, sinks, slopes, scales, out, partial, peaks, shared,
    scale, softcap, num_rows, num_tokens,
    q_stride, page_stride, kv_stride, head_stride, slot_stride, table_stride,
    WINDOW: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_SLOPES: tl.constexpr, HAS_SCALES: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Arguments and results of `paged_decode.decode`."""
    LOG2E: tl.constexpr = 1.4426950408889634
    worker, num_workers = tl.program_id(0), tl.num_programs(0)
    dim, m_row = tl.arange(0, D_PAD), tl.arange(0, M)
    query, member = m_row // GROUP, m_row % GROUP
    per, at_first, stop, b, head, tile = _start(starts, lengths, num_rows, worker, num_workers, N, WINDOW, QUERIES,
                                                ROWS, HEADS)  # fmt: skip
    tl.store(shared + worker * 5, 0)
    begin, count, length = _row(starts, lengths, b, num_rows, QUERIES)
    page = pages_of(tables + b.to(tl.int64) * table_stride, tile, tile + (at_first < stop), length, N, PAGE)
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    sums = tl.zeros([M, D_PAD], tl.float32)
    for at_tile in range(at_first, stop):
        first_tile = _first_tile(count, length, N, WINDOW)
        lowest = tl.maximum(length - count - WINDOW + 1, 0) if WINDOW > 0 else 0
        row_tiles = tl.maximum((length + N - 1) // N - first_tile, 1)
        last = tile + 1 >= first_tile + row_tiles
        next_head = tl.where(last, head + 1, head)
        next_b = tl.where(next_head == HEADS, b + 1, b)
        next_head = tl.where(next_head == HEADS, 0, next_head)
        next_begin, next_count, next_length = _row(starts, lengths, next_b, num_rows, QUERIES)
        next_tile = tl.where(last, _first_tile(next_count, next_length, N, WINDOW), tile + 1)
        table = tables + next_b.to(tl.int64) * table_stride
        next_page = pages_of(table, next_tile, next_tile + (at_tile + 1 < stop), next_length, N, PAGE)

        used = query < count
        position = length - count + query
        q_head = head * GROUP + member
        q_at = (begin + query)[:, None].to(tl.int64) * q_stride + q_head[:, None] * D + dim[None, :]
        q_MD = tl.load(q + q_at, mask=used[:, None] & (dim < D)[None, :], other=0.0)
        key = tile * N + tl.arange(0, N)
        there = (key < length) & (key >= lowest)
        k_at = cache + head.to(tl.int64) * head_stride + (page * page_stride + (key % PAGE) * slot_stride)[:, None]
        k_at += dim[None, :]
        mask = there[:, None] & (dim < D)[None, :]
        k_ND = tl.load(k_at, mask=mask, other=0.0)
        scores = tl.dot(q_MD, tl.trans(k_ND.to(q_MD.dtype)), input_precision=PRECISION)
        factor = scale * LOG2E
        if HAS_SCALES:
            factor = factor * tl.load(scales + head)
        if HAS_CAP:
            scores, factor = softcapped(scores * factor, softcap * LOG2E), 1.0
        if HAS_SLOPES:
            slope = tl.load(slopes + q_head, mask=used, other=0.0).to(tl.float32) * LOG2E
            scores = scores * factor + slope[:, None] * (key[None, :] - position[:, None]).to(tl.float32)
            factor = 1.0
        seen = there[None, :] & (key[None, :] <= position[:, None])
        if WINDOW > 0:
            seen = seen & (key[None, :] > position[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        fresh = (tile == first_tile) | (at_tile == at_first)
        top = tl.where(fresh, float("-inf"), top)
        new_top = tl.maximum(top, tl.max(scores, 1) * factor)
        safe = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores * factor - safe[:, None])
        keep = tl.where(fresh, 0.0, tl.exp2(top - safe))
        total = total * keep + tl.sum(weights, 1)
        v_ND = tl.load(k_at + kv_stride, mask=mask, other=0.0)
        sums = tl.where(fresh, 0.0, sums * keep[:, None])
        sums = tl.dot(weights.to(q_MD.dtype), v_ND.to(q_MD.dtype), sums, input_precision=PRECISION)
        top = new_top

        row_first = at_tile - (tile - first_tile)
        if last & (row_first >= at_first):
            norm, shrink = total, tl.full([M], 1.0, tl.float32)
            if HAS_SINKS:
                sink = tl.load(sinks + q_head, mask=used, other=float("-inf")).to(tl.float32) * LOG2E
                high = tl.maximum(top, sink)
                high = tl.where(high == float("-inf"), 0.0, high)
                shrink = tl.exp2(top - high)
                norm = total * shrink + tl.exp2(sink - high)
            v_scale = tl.load(scales + HEADS + head) if HAS_SCALES else 1.0
            whole = sums * (shrink * v_scale / tl.where(norm == 0.0, 1.0, norm))[:, None]
            o_at = (begin + query)[:, None].to(tl.int64) * (HEADS * GROUP * D) + q_head[:, None] * D + dim[None, :]
            tl.store(out + o_at, whole.to(out.dtype.element_ty), mask=used[:, None] & (dim < D)[None, :])
        elif last | (at_tile + 1 == stop):
            slot = 2 * worker + (row_first > at_first).to(tl.int32)
            tl.store(peaks + slot * (2 * M) + m_row, top)
            tl.store(peaks + slot * (2 * M) + M + m_row, total)
            tl.store(partial + (slot * M + m_row[:, None]) * D_PAD + dim[None, :], sums)
            if row_first >= at_first:
                tl.store(shared + worker * 5, (row_first + row_tiles - 1) // per - worker + 1)
                tl.store(shared + worker * 5 + 1, slot)
                tl.store(shared + worker * 5 + 2, begin)
                tl.store(shared + worker * 5 + 3, count)
                tl.store(shared + worker * 5 + 4, head)
        b, head, tile, page = next_b, next_head, next_tile, next_page
        begin, count, length = next_begin, next_count, next_length

    for token in range(tl.load(starts + num_rows) + worker, num_tokens, num_workers):  # padding gets zeros
        for part in range(HEADS * GROUP):
            at = (dim * 0 + token).to(tl.int64) * (HEADS * GROUP * D) + part * D + dim
            tl.store(out + at, tl.zeros([D_PAD], out.dtype.element_ty), mask=dim < D)
