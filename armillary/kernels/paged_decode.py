"""Split-KV attention over pages for rows of few queries: the work of a batch is cut into equal stretches of key tiles.

Work is the list of all (sequence, KV head, key tile), in that order; worker w takes tiles [w·per, (w+1)·per) whatever
the lengths are, so every multiprocessor reads the same number of bytes and the grid never depends on what is on the
device. Where a (sequence, head) is shared by several workers, each leaves a partial softmax; `combine` adds those up in
a fixed order. The query heads of a KV head (and its few queries) are the rows of one product.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def softcapped(scores, cap):
    """cap · tanh(scores / cap), by an exponential that cannot overflow."""
    grown = tl.exp(-2.0 * tl.abs(scores) / cap)
    size = cap * (1.0 - grown) / (1.0 + grown)
    return tl.where(scores < 0, -size, tl.where(scores == scores, size, scores))


@triton.jit
def _plan(starts, lengths, num_rows, N: tl.constexpr, WINDOW: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr):
    """Key tiles of every row (0 for rows of other kernels, 1 at least), and their running sum."""
    row = tl.arange(0, ROWS)
    begin = tl.load(starts + row, mask=row < num_rows, other=0)
    count = tl.load(starts + row + 1, mask=row < num_rows, other=0) - begin
    length = tl.load(lengths + row, mask=row < num_rows, other=0)
    first = tl.zeros_like(length)
    if WINDOW > 0:
        first = tl.maximum(length - count - WINDOW + 1, 0) // N
    tiles = tl.maximum((length + N - 1) // N - first, 1)
    tiles = tl.where((count > 0) & (count <= QUERIES), tiles, 0)
    return row, tiles, tl.cumsum(tiles, 0)


@triton.jit
def _next(starts, b, QUERIES: tl.constexpr):
    """The first row from b on that this kernel works on; there is one."""
    count = tl.load(starts + b + 1) - tl.load(starts + b)
    while (count == 0) | (count > QUERIES):
        b += 1
        count = tl.load(starts + b + 1) - tl.load(starts + b)
    return b


@triton.jit
def pages_of(table, tile, stop, length, N: tl.constexpr, PAGE: tl.constexpr):
    """Pages of a tile's keys: one number where a tile never crosses a page, else one a key."""
    if PAGE % N == 0:
        return tl.load(table + tile * N // PAGE, mask=tile < stop, other=0).to(tl.int64)
    else:
        key = tile * N + tl.arange(0, N)
        return tl.load(table + key // PAGE, mask=(key < length) & (tile < stop), other=0).to(tl.int64)


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def decode(
    q, cache, tables, starts, lengths, sinks, slopes, scales, out, partial, peaks, shared,
    scale, softcap, num_rows, num_tokens,
    q_stride, page_stride, kv_stride, head_stride, slot_stride, table_stride,
    WINDOW: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_SLOPES: tl.constexpr, HAS_SCALES: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """q, out [T, HEADS·GROUP, D]; rows of the product are (query, head of the group). A worker leaves at most two
    partial results, of the first and the last (sequence, head) it works on; `shared` tells of one that begins here."""
    LOG2E: tl.constexpr = 1.4426950408889634
    worker, num_workers = tl.program_id(0), tl.num_programs(0)
    dim = tl.arange(0, D_PAD)
    rows, tiles, upto = _plan(starts, lengths, num_rows, N, WINDOW, QUERIES, ROWS)
    total_tiles = tl.max(upto, 0) * HEADS
    per = tl.maximum((total_tiles + num_workers - 1) // num_workers, 1)
    at_tile = worker * per
    stop = tl.minimum(at_tile + per, total_tiles)
    tl.store(shared + worker * 5, 0)

    b = tl.sum((upto * HEADS <= at_tile).to(tl.int32), 0)
    row_tiles = tl.maximum(tl.sum(tl.where(rows == b, tiles, 0), 0), 1)
    before = tl.sum(tl.where(rows == b, upto - tiles, 0), 0) * HEADS
    head = (at_tile - before) // row_tiles
    row_first = before + head * row_tiles
    while at_tile < stop:
        begin, length = tl.load(starts + b), tl.load(lengths + b)
        count = tl.load(starts + b + 1) - begin
        lowest = tl.maximum(length - count - WINDOW + 1, 0) if WINDOW > 0 else 0
        first_tile = lowest // N
        row_tiles = tl.maximum((length + N - 1) // N - first_tile, 1)
        segment_stop = tl.minimum(stop, row_first + row_tiles)
        tile_start, tile_stop = first_tile + at_tile - row_first, first_tile + segment_stop - row_first
        table = tables + b.to(tl.int64) * table_stride
        page = pages_of(table, tile_start, tile_stop, length, N, PAGE)

        m_row = tl.arange(0, M)
        query = m_row // GROUP
        q_head = head * GROUP + m_row % GROUP
        used = query < count
        position = length - count + query
        q_at = (begin + query)[:, None].to(tl.int64) * q_stride + q_head[:, None] * D + dim[None, :]
        q_MD = tl.load(q + q_at, mask=used[:, None] & (dim < D)[None, :], other=0.0)
        if HAS_SLOPES:
            slope = tl.load(slopes + q_head, mask=used, other=0.0).to(tl.float32) * LOG2E
        k_scale, v_scale = scale * LOG2E, 1.0
        if HAS_SCALES:
            k_scale = scale * LOG2E * tl.load(scales + head)
            v_scale = tl.load(scales + HEADS + head)

        top = tl.full([M], float("-inf"), tl.float32)
        total = tl.zeros([M], tl.float32)
        sums = tl.zeros([M, D_PAD], tl.float32)
        keys = cache + head.to(tl.int64) * head_stride
        for tile in range(tile_start, tile_stop):
            next_page = pages_of(table, tile + 1, tile_stop, length, N, PAGE)  # a step ahead: its latency is hidden
            key = tile * N + tl.arange(0, N)
            there = (key < length) & (key >= lowest)
            at = page * page_stride + (key % PAGE) * slot_stride
            mask = there[:, None] & (dim < D)[None, :]
            k_ND = tl.load(keys + at[:, None] + dim[None, :], mask=mask, other=0.0)
            scores = tl.dot(q_MD, tl.trans(k_ND.to(q_MD.dtype)), input_precision=PRECISION)
            factor = k_scale  # multiplied in where the maximum is subtracted: one operation for both
            if HAS_CAP:
                scores, factor = softcapped(scores * k_scale, softcap * LOG2E), 1.0
            if HAS_SLOPES:
                scores = scores * factor + slope[:, None] * (key[None, :] - position[:, None]).to(tl.float32)
                factor = 1.0
            seen = there[None, :] & (key[None, :] <= position[:, None])
            if WINDOW > 0:
                seen = seen & (key[None, :] > position[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 1) * factor)
            safe = tl.where(new_top == float("-inf"), 0.0, new_top)
            weights = tl.exp2(scores * factor - safe[:, None])
            keep = tl.exp2(top - safe)
            total = total * keep + tl.sum(weights, 1)
            v_ND = tl.load(keys + kv_stride + at[:, None] + dim[None, :], mask=mask, other=0.0)
            sums = sums * keep[:, None]
            sums = tl.dot(weights.to(q_MD.dtype), v_ND.to(q_MD.dtype), sums, input_precision=PRECISION)
            top = new_top
            page = next_page

        if (row_first >= worker * per) & (row_first + row_tiles <= stop):
            if HAS_SINKS:
                sink = tl.load(sinks + q_head, mask=used, other=float("-inf")).to(tl.float32) * LOG2E
                new_top = tl.maximum(top, sink)
                safe = tl.where(new_top == float("-inf"), 0.0, new_top)
                total = total * tl.exp2(top - safe) + tl.exp2(sink - safe)
                sums = sums * tl.exp2(top - safe)[:, None]
            sums = sums * (v_scale / tl.where(total == 0.0, 1.0, total))[:, None]
            o_at = (begin + query)[:, None].to(tl.int64) * (HEADS * GROUP * D) + q_head[:, None] * D + dim[None, :]
            tl.store(out + o_at, sums.to(out.dtype.element_ty), mask=used[:, None] & (dim < D)[None, :])
        else:
            slot = 2 * worker + (at_tile > worker * per).to(tl.int32)
            tl.store(peaks + slot * (2 * M) + m_row, top)
            tl.store(peaks + slot * (2 * M) + M + m_row, total)
            tl.store(partial + (slot * M + m_row[:, None]) * D_PAD + dim[None, :], sums)
            if row_first >= worker * per:
                tl.store(shared + worker * 5, (row_first + row_tiles - 1) // per - worker + 1)
                tl.store(shared + worker * 5 + 1, slot)
                tl.store(shared + worker * 5 + 2, begin)
                tl.store(shared + worker * 5 + 3, count)
                tl.store(shared + worker * 5 + 4, head)
        at_tile = segment_stop
        if at_tile < stop:  # the next KV head, or the next sequence with queries for this kernel
            row_first = at_tile
            head += 1
            if head == HEADS:
                head = 0
                b = _next(starts, b + 1, QUERIES)

    for token in range(tl.load(starts + num_rows) + worker, num_tokens, num_workers):  # padding gets zeros
        for part in range(HEADS * GROUP):
            at = (dim * 0 + token).to(tl.int64) * (HEADS * GROUP * D) + part * D + dim
            tl.store(out + at, tl.zeros([D_PAD], out.dtype.element_ty), mask=dim < D)


@triton.jit
def combine(
    partial, peaks, shared, sinks, scales, out,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_SCALES: tl.constexpr, M: tl.constexpr, R: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Program (worker, R rows of the product): the sum of the partial results that begin with this worker's."""
    LOG2E: tl.constexpr = 1.4426950408889634
    worker = tl.program_id(0)
    row = tl.program_id(1) * R + tl.arange(0, R)
    about = shared + worker * 5
    num_parts, first_slot, begin = tl.load(about), tl.load(about + 1), tl.load(about + 2)
    count, head = tl.load(about + 3), tl.load(about + 4)
    if num_parts == 0:
        return
    dim = tl.arange(0, D_PAD)
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
