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

from armillary.kernels.core.prefetch_triton import fetch
from armillary.kernels.paged.fp8_cache_triton import absorbed_pairs, in_fp16, loaded_pairs, whole_of
from armillary.kernels.paged.softmax_triton import (
    absorbed,
    finished,
    first_key,
    pages_of,
    places_of,
    positive,
    scores_of,
    weighed,
)

# M rows (query, head of the group), N keys of a tile, D head dim


@triton.jit
def _row(starts, lengths, b, num_rows, QUERIES: tl.constexpr, CACHE: tl.constexpr):
    """First query, number of queries and keys of row b; none where the row is not for this kernel."""
    there = b < num_rows
    begin = tl.load(starts + b, mask=there, other=0, cache_modifier=CACHE)
    count = tl.load(starts + b + 1, mask=there, other=0, cache_modifier=CACHE) - begin
    length = tl.load(lengths + b, mask=there, other=0, cache_modifier=CACHE)
    is_split = (count > 0) & (count <= QUERIES)
    return begin, tl.where(is_split, count, 0), tl.where(is_split, length, 0)


@triton.jit
def _lowest(count, length, WINDOW: tl.constexpr, CHUNKED: tl.constexpr):
    """The first key that any query of a row sees."""
    return first_key(tl.maximum(length - count, 0), WINDOW, CHUNKED)


@triton.jit
def _first_tile(count, length, N: tl.constexpr, WINDOW: tl.constexpr, CHUNKED: tl.constexpr):
    return _lowest(count, length, WINDOW, CHUNKED) // N


@triton.jit
def _nothing(M: tl.constexpr, N: tl.constexpr, D_PAD: tl.constexpr, PAIRS: tl.constexpr):
    """Largest scores, weights by position in a tile (added up at the end of a row) and weighted values of no keys."""
    top, totals = tl.full([M], float("-inf"), tl.float32), tl.zeros([M, N], tl.float32)
    if PAIRS:
        return top, totals, (tl.zeros([M, D_PAD // 2], tl.float32), tl.zeros([M, D_PAD // 2], tl.float32))
    else:
        return top, totals, (tl.zeros([M, D_PAD], tl.float32),)


@triton.jit
def _row_tiles(first_tile, length, N: tl.constexpr):
    """Tiles of a row, at least one."""
    return tl.maximum((length + N - 1) // N - first_tile, 1)


@triton.jit
def _start(
    starts,
    lengths,
    num_rows,
    worker,
    num_workers,
    N: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    CACHE: tl.constexpr,
):
    """Where a worker begins and stops: tiles per worker, its first and last, its row, and how many tiles of that row
    come before."""
    row = tl.arange(0, ROWS)
    _, count, length = _row(starts, lengths, row, num_rows, QUERIES, CACHE)
    first = _first_tile(count, length, N, WINDOW, CHUNKED)
    tiles = tl.where(row < num_rows, _row_tiles(first, length, N), 0)
    total, most = tl.sum(tiles, 0) * HEADS, tl.max(tiles, 0)
    per = tl.maximum((total + num_workers - 1) // num_workers, 1)
    begin, b, inside = worker * per, 0, 0
    if total == most * num_rows * HEADS:  # all rows alike: they need no search
        # nor are rows split where that leaves few workers idle: adding up costs some 10 µs
        rounded = (per + most - 1) // most * most
        per = tl.where((per < 512) & (rounded - per <= per // 28), rounded, per)
        begin = worker * per
        b = begin // (most * HEADS)
        inside = begin % (most * HEADS)
    else:
        upto = tl.cumsum(tiles, 0) * HEADS
        b = tl.sum((upto <= begin).to(tl.int32), 0)
        inside = begin - tl.max(tl.where(upto <= begin, upto, 0), 0)
    return per, begin, tl.minimum(begin + per, total), b, inside


@triton.jit
def _fetch_lists(tables, starts, lengths, num_rows, table_pages, worker, num_workers, table_stride, ROWS: tl.constexpr):
    """Prefetch the work lists into L2, while the previous kernel still runs and may yet write them: all rows, and the
    tables of those that a worker would begin with if all were alike."""
    line: tl.constexpr = 32  # numbers in 128 bytes
    row = tl.minimum(tl.arange(0, ROWS // line) * line, num_rows - 1)
    fetch(starts + row)
    fetch(lengths + row)
    b = tl.minimum((worker * num_rows).to(tl.int64) // num_workers + tl.arange(0, 4), num_rows - 1)
    page = tl.minimum(tl.arange(0, 2) * line, table_pages - 1)
    fetch(tables + b[:, None] * table_stride + page[None, :])


@triton.jit
def _within(x, count):
    return tl.minimum(tl.maximum(x, 0), count - 1)


@triton.jit
def _fetch_keys(
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
    N: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    TILES: tl.constexpr,
):
    """Prefetch the first TILES of a worker too, according to the lists that the previous kernel may yet write: a guess,
    clamped to the cache. Lists are read past L1, which would still hold the old ones after the wait."""
    _, _, _, b, inside = _start(
        starts, lengths, num_rows, worker, num_workers, N, WINDOW, CHUNKED, QUERIES, ROWS, HEADS, ".cg"
    )
    b = _within(b, num_rows)
    _, count, length = _row(starts, lengths, b, num_rows, QUERIES, ".cg")
    first = _first_tile(count, length, N, WINDOW, CHUNKED)
    tiles = _row_tiles(first, length, N)
    head, tile = _within(inside // tiles, HEADS), first + inside % tiles
    line: tl.constexpr = 1024 // cache.dtype.element_ty.primitive_bitwidth  # 128 bytes
    LINES: tl.constexpr = D_PAD // line if line < D_PAD else 1
    dim = tl.minimum(tl.arange(0, LINES) * line, D - 1)[None, :]
    for i in tl.static_range(TILES):
        key = _within((tile + i) * N + tl.arange(0, N), table_pages * PAGE)
        page = tl.load(tables + b.to(tl.int64) * table_stride + key // PAGE, cache_modifier=".cg")
        at = _within(page, num_pages).to(tl.int64) * page_stride + (key % PAGE) * slot_stride
        keys = cache + head.to(tl.int64) * head_stride + at[:, None] + dim
        fetch(keys)
        fetch(keys + kv_stride)


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
            _fetch_keys(
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
            _fetch_lists(tables, starts, lengths, num_rows, table_pages, worker, num_workers, table_stride, ROWS)
        gdc_wait()
    per, at_first, stop, b, inside = _start(
        starts, lengths, num_rows, worker, num_workers, N, WINDOW, CHUNKED, QUERIES, ROWS, HEADS, ""
    )
    begin, count, length = _row(starts, lengths, b, num_rows, QUERIES, "")
    row_tiles = _row_tiles(_first_tile(count, length, N, WINDOW, CHUNKED), length, N)
    head, tile = inside // row_tiles, _first_tile(count, length, N, WINDOW, CHUNKED) + inside % row_tiles
    tl.store(shared + worker * 5, 0)
    table = tables + b.to(tl.int64) * table_stride
    page = pages_of(table, tile, tile + (at_first < stop), _lowest(count, length, WINDOW, CHUNKED), length, N, PAGE)
    top, totals, sums = _nothing(M, N, D_PAD, PAIRS)
    for at_tile in range(at_first, stop):
        first_tile = _first_tile(count, length, N, WINDOW, CHUNKED)
        lowest = _lowest(count, length, WINDOW, CHUNKED)
        row_tiles = _row_tiles(first_tile, length, N)
        last = tile + 1 >= first_tile + row_tiles
        next_head = tl.where(last, head + 1, head)
        next_b = tl.where(next_head == HEADS, b + 1, b)
        next_head = tl.where(next_head == HEADS, 0, next_head)
        next_begin, next_count, next_length = _row(starts, lengths, next_b, num_rows, QUERIES, "")
        next_tile = tl.where(last, _first_tile(next_count, next_length, N, WINDOW, CHUNKED), tile + 1)
        table = tables + next_b.to(tl.int64) * table_stride
        next_lowest = _lowest(next_count, next_length, WINDOW, CHUNKED)
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
