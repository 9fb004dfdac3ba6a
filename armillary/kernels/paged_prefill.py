"""Attention over pages for rows of many queries (chunks of a prompt): a program takes some queries of one KV head.

The queries of all sequences are packed, so a program finds its sequence by where queries start; there are as many
programs as packed tokens and sequences could ever need, and those without work leave at once. Rows of the product are
(query, head of the group); keys before the first query of the chunk need no causal mask and have a loop of their own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from armillary.kernels.paged_softmax import absorbed, finished, pages_of, scores_of


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


@triton.jit(do_not_specialize=["num_rows"])
def prefill(
    q, cache, tables, starts, lengths, sinks, slopes, scales, out,
    scale, softcap, num_rows,
    q_stride, page_stride, kv_stride, head_stride, slot_stride, table_stride,
    WINDOW: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_SLOPES: tl.constexpr, HAS_SCALES: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (tile of queries, KV head); rows of at most QUERIES queries are left to `decode`."""
    LOG2E: tl.constexpr = 1.4426950408889634
    PER: tl.constexpr = M // GROUP
    tile_index = tl.num_programs(0) - 1 - tl.program_id(0)  # late queries see most keys: they begin first
    head = tl.program_id(1)
    rows = tl.arange(0, ROWS)
    row_tile = tl.load(starts + rows, mask=rows < num_rows, other=0) // PER + rows
    b = tl.sum(((row_tile <= tile_index) & (rows < num_rows)).to(tl.int32), 0) - 1
    begin, length = tl.load(starts + b), tl.load(lengths + b)
    count = tl.load(starts + b + 1) - begin
    first_query = (tile_index - (begin // PER + b)) * PER
    if (count <= QUERIES) | (first_query >= count):
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
        k_scale = scale * LOG2E * tl.load(scales + head)
        v_scale = tl.load(scales + HEADS + head)

    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    sums = tl.zeros([M, D_PAD], tl.float32)
    keys = cache + head.to(tl.int64) * head_stride
    table = tables + b.to(tl.int64) * table_stride
    first_position = length - count + first_query
    upto = tl.minimum(length, first_position + PER)
    lowest = tl.maximum(first_position - WINDOW + 1, 0) if WINDOW > 0 else 0
    start, stop = lowest // N, (upto + N - 1) // N
    clear_start = start
    if WINDOW > 0:  # tiles that begin where the last query no longer sees are masked too
        clear_start = tl.maximum(tl.minimum((upto - WINDOW + N - 1) // N, stop), start)
    clear_stop = tl.maximum(tl.minimum((first_position + 1) // N, stop), clear_start)
    if WINDOW > 0:
        top, total, sums = _tiles(
            q_MD, top, total, sums, keys, kv_stride, page_stride, slot_stride, table, start, clear_start, length,
            lowest, position, slope, k_scale, softcap, dim, True, WINDOW, D, PAGE, HAS_CAP, HAS_SLOPES, N, PRECISION,
        )  # fmt: skip
    top, total, sums = _tiles(
        q_MD, top, total, sums, keys, kv_stride, page_stride, slot_stride, table, clear_start, clear_stop, length,
        lowest, position, slope, k_scale, softcap, dim, False, WINDOW, D, PAGE, HAS_CAP, HAS_SLOPES, N, PRECISION,
    )  # fmt: skip
    top, total, sums = _tiles(
        q_MD, top, total, sums, keys, kv_stride, page_stride, slot_stride, table, clear_stop, stop, length,
        lowest, position, slope, k_scale, softcap, dim, True, WINDOW, D, PAGE, HAS_CAP, HAS_SLOPES, N, PRECISION,
    )  # fmt: skip
    sums = finished(top, total, sums, sinks, q_head, used, v_scale, HAS_SINKS)
    o_at = (begin + query)[:, None].to(tl.int64) * (HEADS * GROUP * D) + q_head[:, None] * D + dim[None, :]
    tl.store(out + o_at, sums.to(out.dtype.element_ty), mask=used[:, None] & (dim < D)[None, :])
