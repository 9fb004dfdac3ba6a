"""Attention over pages for rows of many queries (prefill chunks): a program takes some queries of one KV head.

There are as many programs as packed tokens and sequences could ever need, or as run at once. Short chunks of long
contexts are too few programs for the GPU: their keys are split too, and `combine_prefill` adds up.
"""

import triton
import triton.language as tl

from armillary.kernels.paged.prefill_tile_triton import attend_tile
from armillary.kernels.paged.prefill_work_triton import key_reach, most_parts, num_parts, query_tiles, tile_place
from armillary.kernels.paged.softmax_triton import finished


@triton.jit(do_not_specialize=["num_rows"])
def prefill(
    q,
    cache,
    tables,
    starts,
    lengths,
    sinks,
    slopes,
    scales,
    out,
    partial,
    peaks,
    scale,
    softcap,
    num_rows,
    q_stride,
    page_stride,
    kv_stride,
    head_stride,
    slot_stride,
    table_stride,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    SPLITS: tl.constexpr,
    LEAST: tl.constexpr,
    SLOTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (tile of queries, KV head); where keys are split, a persistent program strides over (tile, head, part of
    the keys), because programs without work would keep others out. Late queries see most keys: they begin first."""
    PER: tl.constexpr = M // GROUP
    row_tiles = query_tiles(starts, num_rows, PER, QUERIES, ROWS)
    live = tl.sum(row_tiles, 0)
    first, step, most = tl.program_id(0), tl.num_programs(0), 1
    if SPLITS > 1:
        most = most_parts(live * HEADS, SPLITS, SLOTS)
    for work in range(first, live * HEADS * most, step):
        if SPLITS > 1:
            split, head, tile = work % most, work // most % HEADS, live - 1 - work // most // HEADS
        else:  # concurrent programs read the keys of one head
            split, head, tile = 0, work // live, live - 1 - work % live
        b, begin, count, length, first_query = tile_place(starts, lengths, row_tiles, tile, PER, ROWS)
        lowest, upto, start, stop = key_reach(length - count + first_query, length, PER, N, WINDOW, CHUNKED)
        parts = num_parts(start, stop, most, LEAST)
        if split < parts:
            attend_tile(
                q,
                cache,
                tables + b.to(tl.int64) * table_stride,
                sinks,
                slopes,
                scales,
                out,
                partial,
                peaks,
                scale,
                softcap,
                q_stride,
                page_stride,
                kv_stride,
                head_stride,
                slot_stride,
                tile,
                head,
                split,
                parts,
                begin,
                count,
                length,
                first_query,
                lowest,
                upto,
                start,
                stop,
                WINDOW,
                CHUNKED,
                HEADS,
                GROUP,
                D,
                D_PAD,
                PAGE,
                HAS_CAP,
                HAS_SINKS,
                HAS_SLOPES,
                HAS_SCALES,
                M,
                N,
                SPLITS,
                PRECISION,
            )


@triton.jit(do_not_specialize=["num_rows"])
def combine_prefill(
    partial,
    peaks,
    starts,
    lengths,
    sinks,
    scales,
    out,
    num_rows,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    SPLITS: tl.constexpr,
    LEAST: tl.constexpr,
    SLOTS: tl.constexpr,
    R: tl.constexpr,
):
    """A persistent program strides over (tile of queries, KV head, R rows of it): the sum of the results for the parts
    of the keys, in their order."""
    PER: tl.constexpr = M // GROUP
    PIECES: tl.constexpr = M // R
    row_tiles = query_tiles(starts, num_rows, PER, QUERIES, ROWS)
    live = tl.sum(row_tiles, 0)
    most = most_parts(live * HEADS, SPLITS, SLOTS)
    dim = tl.arange(0, D_PAD)
    for work in range(tl.program_id(0), live * HEADS * PIECES, tl.num_programs(0)):
        tile, head = work // PIECES // HEADS, work // PIECES % HEADS
        _, begin, count, length, first_query = tile_place(starts, lengths, row_tiles, tile, PER, ROWS)
        _, _, start, stop = key_reach(length - count + first_query, length, PER, N, WINDOW, CHUNKED)
        parts = num_parts(start, stop, most, LEAST)
        if parts > 1:
            m_row = work % PIECES * R + tl.arange(0, R)
            query, q_head = first_query + m_row // GROUP, head * GROUP + m_row % GROUP
            used = (query < count) & (m_row < PER * GROUP)
            top = tl.full([R], float("-inf"), tl.float32)
            total = tl.zeros([R], tl.float32)
            sums = tl.zeros([R, D_PAD], tl.float32)
            for part in range(parts):
                slot = ((tile * HEADS + head) * SPLITS + part).to(tl.int64)
                new_top = tl.load(peaks + slot * (2 * M) + m_row)
                new_total = tl.load(peaks + slot * (2 * M) + M + m_row)
                new_sums = tl.load(partial + (slot * M + m_row[:, None]) * D_PAD + dim[None, :])
                high = tl.maximum(top, new_top)
                safe = tl.where(high == float("-inf"), 0.0, high)
                rescale, add = tl.exp2(top - safe), tl.exp2(new_top - safe)
                total = total * rescale + new_total * add
                sums = sums * rescale[:, None] + new_sums * add[:, None]
                top = high
            v_scale = tl.load(scales + HEADS + head) if HAS_SCALES else 1.0
            result = finished(top, total, sums, sinks, q_head, used, v_scale, HAS_SINKS)
            o_at = (begin + query)[:, None].to(tl.int64) * (HEADS * GROUP * D) + q_head[:, None] * D + dim[None, :]
            tl.store(out + o_at, result.to(out.dtype.element_ty), mask=used[:, None] & (dim < D)[None, :])
