"""Attention over pages for rows of many queries (chunks of a prompt): a program takes some queries of one KV head.

The queries of all sequences are packed, so a program finds its sequence by where queries start; there are as many
programs as packed tokens and sequences could ever need, and those without work leave at once. Rows of the product are
(query, head of the group); keys before the first query of the chunk need no causal mask and have a loop of their own.
Short chunks of long texts are too few programs for the chip: their keys are split too, and `combine_prefill` adds up.
"""

from __future__ import annotations

import triton
import triton.language as tl

from armillary.kernels.paged_softmax import absorbed, finished, pages_of, positive, scores_of


@triton.jit
def _tiles(
    q_MD, top, total, sums, keys, kv_stride, page_stride, slot_stride, table, start, stop, length, lowest, position,
    slope, k_scale, softcap, dim,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Online softmax over key tiles [start, stop); MASKED where a tile may hold keys that some query must not see."""
    LOG2E: tl.constexpr = 1.4426950408889634
    page = pages_of(table, start, stop, lowest, length, N, PAGE)
    for tile in range(start, stop):
        next_page = pages_of(table, tile + 1, stop, lowest, length, N, PAGE)
        key = tile * N + tl.arange(0, N)
        at = page * page_stride + (key % PAGE) * slot_stride
        k_at = keys + at[:, None] + dim[None, :]
        there = (key < length) & (key >= lowest)
        if MASKED:
            mask = (dim < D)[None, :] & there[:, None]
            k_ND, v_ND = tl.load(k_at, mask=mask, other=0.0), tl.load(k_at + kv_stride, mask=mask, other=0.0)
        elif dim.shape[0] > D:
            mask = (dim < D)[None, :]
            k_ND, v_ND = tl.load(k_at, mask=mask, other=0.0), tl.load(k_at + kv_stride, mask=mask, other=0.0)
        else:
            k_ND, v_ND = tl.load(k_at), tl.load(k_at + kv_stride)
        scores, factor = scores_of(q_MD, k_ND, k_scale, softcap * LOG2E, slope, key, position, there, MASKED, WINDOW,
                                   HAS_CAP, HAS_SLOPES, PRECISION)  # fmt: skip
        top, total, sums = absorbed(top, total, sums, scores, factor, v_ND, q_MD.dtype, MASKED, False, PRECISION)
        page = next_page
    return top, total, sums


@triton.jit
def _place(starts, lengths, tile_index, num_rows, PER: tl.constexpr, ROWS: tl.constexpr):
    """Row, first query in the batch, number of queries and keys of a tile, and its first query within the row."""
    rows = tl.arange(0, ROWS)
    row_tile = tl.load(starts + rows, mask=rows < num_rows, other=0) // PER + rows
    b = tl.sum(((row_tile <= tile_index) & (rows < num_rows)).to(tl.int32), 0) - 1
    begin, length = tl.load(starts + b), tl.load(lengths + b)
    count = tl.load(starts + b + 1) - begin
    return b, begin, count, length, (tile_index - (begin // PER + b)) * PER


@triton.jit
def _reach(first_position, length, PER: tl.constexpr, N: tl.constexpr, WINDOW: tl.constexpr):
    """First key that a tile's queries see, the one after the last, and the key tiles [start, stop) of these."""
    upto = tl.minimum(length, first_position + PER)
    lowest = tl.maximum(first_position - WINDOW + 1, 0) if WINDOW > 0 else 0
    return lowest, upto, lowest // N, (upto + N - 1) // N


@triton.jit
def _parts(
    starts, start, stop, num_rows, QUERIES: tl.constexpr, ROWS: tl.constexpr, PER: tl.constexpr, HEADS: tl.constexpr,
    SPLITS: tl.constexpr, LEAST: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """How many programs share these key tiles: the number up to SPLITS at which all programs with work fill whole
    turns of the SLOTS that run at once best, but each gets LEAST tiles."""
    rows = tl.arange(0, ROWS)
    counts = tl.load(starts + rows + 1, mask=rows < num_rows, other=0)
    counts -= tl.load(starts + rows, mask=rows < num_rows, other=0)
    live = tl.sum(tl.where(counts > QUERIES, (counts + PER - 1) // PER, 0), 0) * HEADS
    number = tl.arange(1, SPLITS + 1)
    programs = number * live
    used = programs * 1000 // ((programs + SLOTS - 1) // SLOTS * SLOTS) - 10 * number  # of few that are as good, fewer
    best = tl.min(tl.where(used == tl.max(used, 0), number, SPLITS), 0)
    return tl.minimum(tl.maximum((stop - start) // LEAST, 1), best)


@triton.jit(do_not_specialize=["num_rows"])
def prefill(
    q, cache, tables, starts, lengths, sinks, slopes, scales, out, partial, peaks,
    scale, softcap, num_rows,
    q_stride, page_stride, kv_stride, head_stride, slot_stride, table_stride,
    WINDOW: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_SLOPES: tl.constexpr, HAS_SCALES: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr, SLOTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (tile of queries, KV head, part of the keys); rows of at most QUERIES queries are left to `decode`."""
    LOG2E: tl.constexpr = 1.4426950408889634
    PER: tl.constexpr = M // GROUP
    tile_index = tl.num_programs(0) - 1 - tl.program_id(0)  # late queries see most keys: they begin first
    head, split = tl.program_id(1), tl.program_id(2)
    b, begin, count, length, first_query = _place(starts, lengths, tile_index, num_rows, PER, ROWS)
    if (count <= QUERIES) | (first_query >= count):
        return
    first_position = length - count + first_query
    lowest, upto, start, stop = _reach(first_position, length, PER, N, WINDOW)
    parts = 1
    if SPLITS > 1:
        parts = _parts(starts, start, stop, num_rows, QUERIES, ROWS, PER, HEADS, SPLITS, LEAST, SLOTS)
    if split >= parts:
        return

    dim = tl.arange(0, D_PAD)
    m_row = tl.arange(0, M)
    query = first_query + m_row // GROUP
    q_head = head * GROUP + m_row % GROUP
    used = (query < count) & (m_row < PER * GROUP)
    position = length - count + query
    q_at = (begin + query)[:, None].to(tl.int64) * q_stride + q_head[:, None] * D + dim[None, :]
    q_MD = tl.load(q + q_at, mask=used[:, None] & (dim < D)[None, :], other=0.0)
    slope = tl.zeros([M], tl.float32)
    if HAS_SLOPES:
        slope = tl.load(slopes + q_head, mask=used, other=0.0).to(tl.float32) * LOG2E
    k_scale, v_scale = scale * LOG2E, 1.0
    if HAS_SCALES:
        k_scale = scale * LOG2E * positive(tl.load(scales + head))
        v_scale = tl.load(scales + HEADS + head)

    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    sums = tl.zeros([M, D_PAD], tl.float32)
    keys = cache + head.to(tl.int64) * head_stride
    table = tables + b.to(tl.int64) * table_stride
    clear_start = start
    if WINDOW > 0:  # tiles that begin where the last query no longer sees are masked too
        clear_start = tl.maximum(tl.minimum((upto - WINDOW + N - 1) // N, stop), start)
    clear_stop = tl.maximum(tl.minimum((first_position + 1) // N, stop), clear_start)
    mine, end = start, stop
    if SPLITS > 1:
        mine, end = start + (stop - start) * split // parts, start + (stop - start) * (split + 1) // parts
        clear_start = tl.minimum(tl.maximum(clear_start, mine), end)
        clear_stop = tl.minimum(tl.maximum(clear_stop, mine), end)
    if WINDOW > 0:
        top, total, sums = _tiles(
            q_MD, top, total, sums, keys, kv_stride, page_stride, slot_stride, table, mine, clear_start, length,
            lowest, position, slope, k_scale, softcap, dim, True, WINDOW, D, PAGE, HAS_CAP, HAS_SLOPES, N, PRECISION,
        )  # fmt: skip
    top, total, sums = _tiles(
        q_MD, top, total, sums, keys, kv_stride, page_stride, slot_stride, table, clear_start, clear_stop, length,
        lowest, position, slope, k_scale, softcap, dim, False, WINDOW, D, PAGE, HAS_CAP, HAS_SLOPES, N, PRECISION,
    )  # fmt: skip
    top, total, sums = _tiles(
        q_MD, top, total, sums, keys, kv_stride, page_stride, slot_stride, table, clear_stop, end, length,
        lowest, position, slope, k_scale, softcap, dim, True, WINDOW, D, PAGE, HAS_CAP, HAS_SLOPES, N, PRECISION,
    )  # fmt: skip
    if SPLITS > 1:  # noqa: SIM102 (known when compiled)
        if parts > 1:
            slot = ((tile_index * HEADS + head) * SPLITS + split).to(tl.int64)
            tl.store(peaks + slot * (2 * M) + m_row, top)
            tl.store(peaks + slot * (2 * M) + M + m_row, total)
            tl.store(partial + (slot * M + m_row[:, None]) * D_PAD + dim[None, :], sums)
            return
    sums = finished(top, total, sums, sinks, q_head, used, v_scale, HAS_SINKS)
    o_at = (begin + query)[:, None].to(tl.int64) * (HEADS * GROUP * D) + q_head[:, None] * D + dim[None, :]
    tl.store(out + o_at, sums.to(out.dtype.element_ty), mask=used[:, None] & (dim < D)[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def combine_prefill(
    partial, peaks, starts, lengths, sinks, scales, out, num_rows,
    WINDOW: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_SCALES: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr, SLOTS: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Program (tile of queries, KV head, R rows of it): the sum of what the parts of the keys gave."""
    PER: tl.constexpr = M // GROUP
    tile_index, head = tl.program_id(0), tl.program_id(1)
    _, begin, count, length, first_query = _place(starts, lengths, tile_index, num_rows, PER, ROWS)
    if (count <= QUERIES) | (first_query >= count):
        return
    _, _, start, stop = _reach(length - count + first_query, length, PER, N, WINDOW)
    parts = _parts(starts, start, stop, num_rows, QUERIES, ROWS, PER, HEADS, SPLITS, LEAST, SLOTS)
    if parts == 1:
        return
    m_row, dim, part = tl.program_id(2) * R + tl.arange(0, R), tl.arange(0, D_PAD), tl.arange(0, SPLITS)
    query, q_head = first_query + m_row // GROUP, head * GROUP + m_row % GROUP
    used = (query < count) & (m_row < PER * GROUP)
    there = (part < parts)[:, None] & used[None, :]
    slot = ((tile_index * HEADS + head) * SPLITS + part).to(tl.int64)[:, None]
    at = slot * M + m_row[None, :]
    sums = tl.load(partial + at[:, :, None] * D_PAD + dim[None, None, :], mask=there[:, :, None], other=0.0)
    tops = tl.load(peaks + slot * (2 * M) + m_row[None, :], mask=there, other=float("-inf"))
    totals = tl.load(peaks + slot * (2 * M) + M + m_row[None, :], mask=there, other=0.0)
    top = tl.max(tops, 0)
    weights = tl.exp2(tops - tl.where(top == float("-inf"), 0.0, top)[None, :])
    v_scale = tl.load(scales + HEADS + head) if HAS_SCALES else 1.0
    whole = finished(top, tl.sum(totals * weights, 0), tl.sum(sums * weights[:, :, None], 0), sinks, q_head, used,
                     v_scale, HAS_SINKS)  # fmt: skip
    o_at = (begin + query)[:, None].to(tl.int64) * (HEADS * GROUP * D) + q_head[:, None] * D + dim[None, :]
    tl.store(out + o_at, whole.to(out.dtype.element_ty), mask=used[:, None] & (dim < D)[None, :])
