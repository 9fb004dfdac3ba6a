"""Split-KV attention over pages for rows of few queries: the work of a batch is divided into equal ranges of key tiles.

Work is the list of all (sequence, KV head, key tile), in that order; worker w takes tiles [w·per, (w+1)·per) for any
lengths, so every multiprocessor reads the same number of bytes and the grid never depends on device data. A worker
processes its tiles in one loop, so that loads of the next sequence begin while the last tiles of the previous one are
computed. Where several workers share a (sequence, head), each writes a partial softmax, and `combine` adds them
up in a fixed order. The query heads of a KV head (and its few queries) are the rows of one tile.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from armillary.kernels.paged.decode_work_triton import (
    first_key_tile,
    lowest_key,
    num_key_tiles,
    prefetch_keys,
    prefetch_lists,
    row_of,
    worker_range,
)
from armillary.kernels.paged.fp8_cache_triton import absorbed_pairs, in_fp16, loaded_pairs, whole_of
from armillary.kernels.paged.softmax_triton import (
    absorbed,
    finished,
    pages_of,
    places_of,
    positive,
    scores_of,
    weighed,
)

# M rows (query, head of the group), N keys of a tile, D head dim


@triton.jit
def _nothing(M: tl.constexpr, N: tl.constexpr, D_PAD: tl.constexpr, PAIRS: tl.constexpr):
    """Largest scores, weights by position in a tile (added up at the end of a row) and weighted values of no keys."""
    top, totals = tl.full([M], float("-inf"), tl.float32), tl.zeros([M, N], tl.float32)
    if PAIRS:
        return top, totals, (tl.zeros([M, D_PAD // 2], tl.float32), tl.zeros([M, D_PAD // 2], tl.float32))
    else:
        return top, totals, (tl.zeros([M, D_PAD], tl.float32),)


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "table_pages", "num_pages"])
def decode(
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
    shared,
    scale,
    softcap,
    num_rows,
    num_tokens,
    table_pages,
    num_pages,
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
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
    PAIRS: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """q, out [T, HEADS·GROUP, D]. A worker writes at most two partial results, of the first and the last (sequence,
    head) it works on; `shared` marks one that begins here. To keep the loop free of searches every sequence has at
    least one tile; that of a sequence without queries for this kernel writes nothing."""
    LOG2E: tl.constexpr = 1.4426950408889634
    worker, num_workers = tl.program_id(0), tl.num_programs(0)
    dim, m_row = tl.arange(0, D_PAD), tl.arange(0, M)
    query, member = m_row // GROUP, m_row % GROUP
    if EARLY:
        if AHEAD > 0:
            prefetch_keys(
                cache,
                tables,
                starts,
                lengths,
                num_rows,
                table_pages,
                num_pages,
                worker,
                num_workers,
                page_stride,
                kv_stride,
                head_stride,
                slot_stride,
                table_stride,
                N,
                WINDOW,
                CHUNKED,
                QUERIES,
                ROWS,
                HEADS,
                D,
                D_PAD,
                PAGE,
                AHEAD,
            )
        else:
            prefetch_lists(tables, starts, lengths, num_rows, table_pages, worker, num_workers, table_stride, ROWS)
        gdc_wait()
    per, at_first, stop, b, inside = worker_range(
        starts, lengths, num_rows, worker, num_workers, N, WINDOW, CHUNKED, QUERIES, ROWS, HEADS, ""
    )
    begin, count, length = row_of(starts, lengths, b, num_rows, QUERIES, "")
    row_tiles = num_key_tiles(first_key_tile(count, length, N, WINDOW, CHUNKED), length, N)
    head, tile = inside // row_tiles, first_key_tile(count, length, N, WINDOW, CHUNKED) + inside % row_tiles
    tl.store(shared + worker * 5, 0)
    table = tables + b.to(tl.int64) * table_stride
    page = pages_of(table, tile, tile + (at_first < stop), lowest_key(count, length, WINDOW, CHUNKED), length, N, PAGE)
    top, totals, sums = _nothing(M, N, D_PAD, PAIRS)
    for at_tile in range(at_first, stop):
        first_tile = first_key_tile(count, length, N, WINDOW, CHUNKED)
        lowest = lowest_key(count, length, WINDOW, CHUNKED)
        row_tiles = num_key_tiles(first_tile, length, N)
        last = tile + 1 >= first_tile + row_tiles
        next_head = tl.where(last, head + 1, head)
        next_b = tl.where(next_head == HEADS, b + 1, b)
        next_head = tl.where(next_head == HEADS, 0, next_head)
        next_begin, next_count, next_length = row_of(starts, lengths, next_b, num_rows, QUERIES, "")
        next_tile = tl.where(last, first_key_tile(next_count, next_length, N, WINDOW, CHUNKED), tile + 1)
        table = tables + next_b.to(tl.int64) * table_stride
        next_lowest = lowest_key(next_count, next_length, WINDOW, CHUNKED)
        next_page = pages_of(table, next_tile, next_tile + (at_tile + 1 < stop), next_lowest, next_length, N, PAGE)

        used = query < count
        position = length - count + query
        q_head = head * GROUP + member
        q_at = (begin + query)[:, None].to(tl.int64) * q_stride + q_head[:, None] * D + dim[None, :]
        q_MD = tl.load(q + q_at, mask=used[:, None] & (dim < D)[None, :], other=0.0)
        if PAIRS:
            q_MD = in_fp16(q_MD)
        at = page * page_stride + places_of(tile, lowest, length, N, PAGE) * slot_stride
        of_head = cache + head.to(tl.int64) * head_stride
        k_at = of_head + at[:, None] + dim[None, :]
        if PAIRS:
            k_ND, v_ND = tl.load(k_at), loaded_pairs(of_head + kv_stride, at, D)
        elif D_PAD > D:
            k_ND = tl.load(k_at, mask=(dim < D)[None, :], other=0.0)
            v_ND = tl.load(k_at + kv_stride, mask=(dim < D)[None, :], other=0.0)
        else:
            k_ND, v_ND = tl.load(k_at), tl.load(k_at + kv_stride)
        factor = scale * LOG2E
        if HAS_SCALES:
            factor = factor * positive(tl.load(scales + head))
        slope = tl.zeros([M], tl.float32)
        if HAS_SLOPES:
            slope = tl.load(slopes + q_head, mask=used, other=0.0).to(tl.float32) * LOG2E
        key = tile * N + tl.arange(0, N)
        there = (key < length) & (key >= lowest)
        scores, factor = scores_of(
            q_MD,
            k_ND,
            factor,
            softcap * LOG2E,
            slope,
            key,
            position,
            there,
            True,
            WINDOW,
            CHUNKED,
            HAS_CAP,
            HAS_SLOPES,
            PRECISION,
        )
        if PAIRS:
            top, totals, weights, rescale = weighed(top, totals, scores, factor, True, True)
            sums = absorbed_pairs(sums, weights, rescale, v_ND)
        else:
            top, totals, summed = absorbed(
                top, totals, sums[0], scores, factor, v_ND, q_MD.dtype, True, True, PRECISION
            )
            sums = (summed,)

        if last | (at_tile + 1 == stop):
            row_first, total, values = at_tile - (tile - first_tile), tl.sum(totals, 1), whole_of(sums, PAIRS)
            if last & (row_first >= at_first):
                v_scale = tl.load(scales + HEADS + head) if HAS_SCALES else 1.0
                result = finished(top, total, values, sinks, q_head, used, v_scale, HAS_SINKS)
                o_at = (begin + query)[:, None].to(tl.int64) * (HEADS * GROUP * D) + q_head[:, None] * D + dim[None, :]
                tl.store(out + o_at, result.to(out.dtype.element_ty), mask=used[:, None] & (dim < D)[None, :])
            else:
                slot = 2 * worker + (row_first > at_first).to(tl.int32)
                tl.store(peaks + slot * (2 * M) + m_row, top)
                tl.store(peaks + slot * (2 * M) + M + m_row, total)
                tl.store(partial + (slot * M + m_row[:, None]) * D_PAD + dim[None, :], values)
                if row_first >= at_first:
                    tl.store(shared + worker * 5, (row_first + row_tiles - 1) // per - worker + 1)
                    tl.store(shared + worker * 5 + 1, slot)
                    tl.store(shared + worker * 5 + 2, begin)
                    tl.store(shared + worker * 5 + 3, count)
                    tl.store(shared + worker * 5 + 4, head)
            top, totals, sums = _nothing(M, N, D_PAD, PAIRS)
        if EARLY:  # noqa: SIM102 (one is a constant)
            if (
                at_tile + 2 == stop
            ):  # not sooner: a kernel launched beside this one takes registers and bandwidth from it
                gdc_launch_dependents()
        b, head, tile, page = next_b, next_head, next_tile, next_page
        begin, count, length = next_begin, next_count, next_length

    if EARLY:
        gdc_launch_dependents()
    for token in range(tl.load(starts + num_rows) + worker, num_tokens, num_workers):  # padding gets zeros
        for part in range(HEADS * GROUP):
            at = (dim * 0 + token).to(tl.int64) * (HEADS * GROUP * D) + part * D + dim
            tl.store(out + at, tl.zeros([D_PAD], out.dtype.element_ty), mask=dim < D)
