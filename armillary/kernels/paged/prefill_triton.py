"""Attention over pages for rows of many queries (prefill chunks): a program takes some queries of one KV head.

The queries of all sequences are packed, so a program finds its sequence by where queries start; there are as many
programs as packed tokens and sequences could ever need, or as run at once. Rows of a tile are (query, head of the
group); keys before the first query of the chunk need no causal mask and have their own loop. Short chunks of long
contexts are too few programs for the GPU: their keys are split too, and `combine_prefill` adds up.
"""

import triton
import triton.language as tl

from armillary.kernels.paged.softmax_triton import absorbed, finished, first_key, pages_of, positive, scores_of


@triton.jit
def _whole_pages(table, tile, stop, N: tl.constexpr, PAGE: tl.constexpr):
    """Pages of a tile's keys, all of which exist, where a tile is so many pages."""
    return tl.load(table + tile * (N // PAGE) + tl.arange(0, N) // PAGE, mask=tile < stop, other=0)


@triton.jit
def _tiles(
    q_MD,
    top,
    total,
    sums,
    keys,
    kv_stride,
    page_stride,
    slot_stride,
    table,
    start,
    stop,
    length,
    lowest,
    position,
    slope,
    k_scale,
    softcap,
    dim,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Online softmax over key tiles [start, stop); MASKED where a tile may hold keys that some query must not see."""
    LOG2E: tl.constexpr = 1.4426950408889634
    WHOLE: tl.constexpr = not MASKED and N % PAGE == 0  # then no key is replaced, and positions are always the same
    page = _whole_pages(table, start, stop, N, PAGE) if WHOLE else pages_of(table, start, stop, lowest, length, N, PAGE)
    for tile in range(start, stop):
        key = tile * N + tl.arange(0, N)
        if WHOLE:
            next_page = _whole_pages(table, tile + 1, stop, N, PAGE)
            at = page.to(tl.int64) * page_stride + (tl.arange(0, N) % PAGE) * slot_stride
        else:
            next_page = pages_of(table, tile + 1, stop, lowest, length, N, PAGE)
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
        scores, factor = scores_of(
            q_MD,
            k_ND,
            k_scale,
            softcap * LOG2E,
            slope,
            key,
            position,
            there,
            MASKED,
            WINDOW,
            CHUNKED,
            HAS_CAP,
            HAS_SLOPES,
            PRECISION,
        )
        top, total, sums = absorbed(top, total, sums, scores, factor, v_ND, q_MD.dtype, MASKED, False, PRECISION)
        page = next_page
    return top, total, sums


@triton.jit
def _row_tiles(starts, num_rows, PER: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr):
    """Tiles of queries of every row [ROWS]; none where a row is left to `decode`."""
    rows = tl.arange(0, ROWS)
    counts = tl.load(starts + rows + 1, mask=rows < num_rows, other=0)
    counts -= tl.load(starts + rows, mask=rows < num_rows, other=0)
    return tl.where(counts > QUERIES, (counts + PER - 1) // PER, 0)


@triton.jit
def _place(starts, lengths, row_tiles, tile, PER: tl.constexpr, ROWS: tl.constexpr):
    """Row, first query in the batch, number of queries and keys of a tile, and its first query within the row."""
    upto, rows = tl.cumsum(row_tiles, 0), tl.arange(0, ROWS)
    b = tl.sum((upto <= tile).to(tl.int32), 0)
    begin, length = tl.load(starts + b), tl.load(lengths + b)
    count = tl.load(starts + b + 1) - begin
    return b, begin, count, length, (tile - tl.sum(tl.where(rows == b, upto - row_tiles, 0), 0)) * PER


@triton.jit
def _reach(first_position, length, PER: tl.constexpr, N: tl.constexpr, WINDOW: tl.constexpr, CHUNKED: tl.constexpr):
    """First key that a tile's queries see, one past the last, and the key tiles [start, stop) of these."""
    upto = tl.minimum(length, first_position + PER)
    lowest = first_key(first_position, WINDOW, CHUNKED)
    return lowest, upto, lowest // N, (upto + N - 1) // N


@triton.jit
def _most_parts(work, SPLITS: tl.constexpr, SLOTS: tl.constexpr):
    """How many programs share the keys of a tile at most, for `work` tiles and heads: the number up to SPLITS that
    fills whole waves of the SLOTS concurrent programs best; of several equal ones, the smallest."""
    number = tl.arange(1, SPLITS + 1)
    programs = number * tl.maximum(work, 1)
    used = programs * 1000 // ((programs + SLOTS - 1) // SLOTS * SLOTS) - 10 * number
    return tl.min(tl.where(used == tl.max(used, 0), number, SPLITS), 0)


@triton.jit
def _parts(start, stop, most, LEAST: tl.constexpr):
    """The same for one tile, where each program gets at least LEAST key tiles."""
    return tl.minimum(tl.maximum((stop - start) // LEAST, 1), most)


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
    row_tiles = _row_tiles(starts, num_rows, PER, QUERIES, ROWS)
    live = tl.sum(row_tiles, 0)
    first, step, most = tl.program_id(0), tl.num_programs(0), 1
    if SPLITS > 1:
        most = _most_parts(live * HEADS, SPLITS, SLOTS)
    for work in range(first, live * HEADS * most, step):
        if SPLITS > 1:
            split, head, tile = work % most, work // most % HEADS, live - 1 - work // most // HEADS
        else:  # concurrent programs read the keys of one head
            split, head, tile = 0, work // live, live - 1 - work % live
        b, begin, count, length, first_query = _place(starts, lengths, row_tiles, tile, PER, ROWS)
        lowest, upto, start, stop = _reach(length - count + first_query, length, PER, N, WINDOW, CHUNKED)
        parts = _parts(start, stop, most, LEAST)
        if split < parts:
            _tile(
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


@triton.jit
def _tile(
    q,
    cache,
    table,
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
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
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
    PRECISION: tl.constexpr,
):
    """A tile of queries and a part of the keys it sees."""
    LOG2E: tl.constexpr = 1.4426950408889634
    PER: tl.constexpr = M // GROUP
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
    clear_start = start
    if WINDOW > 0:  # tiles that begin where the last query no longer sees are masked too
        last_first = first_key(upto - 1, WINDOW, CHUNKED)
        clear_start = tl.maximum(tl.minimum((last_first + N - 1) // N, stop), start)
    clear_stop = tl.maximum(tl.minimum((length - count + first_query + 1) // N, stop), clear_start)
    part_start, end = start, stop
    if SPLITS > 1:
        part_start, end = start + (stop - start) * split // parts, start + (stop - start) * (split + 1) // parts
        clear_start = tl.minimum(tl.maximum(clear_start, part_start), end)
        clear_stop = tl.minimum(tl.maximum(clear_stop, part_start), end)
    if WINDOW > 0:
        top, total, sums = _tiles(
            q_MD,
            top,
            total,
            sums,
            keys,
            kv_stride,
            page_stride,
            slot_stride,
            table,
            part_start,
            clear_start,
            length,
            lowest,
            position,
            slope,
            k_scale,
            softcap,
            dim,
            True,
            WINDOW,
            CHUNKED,
            D,
            PAGE,
            HAS_CAP,
            HAS_SLOPES,
            N,
            PRECISION,
        )
    top, total, sums = _tiles(
        q_MD,
        top,
        total,
        sums,
        keys,
        kv_stride,
        page_stride,
        slot_stride,
        table,
        clear_start,
        clear_stop,
        length,
        lowest,
        position,
        slope,
        k_scale,
        softcap,
        dim,
        False,
        WINDOW,
        CHUNKED,
        D,
        PAGE,
        HAS_CAP,
        HAS_SLOPES,
        N,
        PRECISION,
    )
    top, total, sums = _tiles(
        q_MD,
        top,
        total,
        sums,
        keys,
        kv_stride,
        page_stride,
        slot_stride,
        table,
        clear_stop,
        end,
        length,
        lowest,
        position,
        slope,
        k_scale,
        softcap,
        dim,
        True,
        WINDOW,
        CHUNKED,
        D,
        PAGE,
        HAS_CAP,
        HAS_SLOPES,
        N,
        PRECISION,
    )
    if parts > 1:
        slot = ((tile * HEADS + head) * SPLITS + split).to(tl.int64)
        tl.store(peaks + slot * (2 * M) + m_row, top)
        tl.store(peaks + slot * (2 * M) + M + m_row, total)
        tl.store(partial + (slot * M + m_row[:, None]) * D_PAD + dim[None, :], sums)
    else:
        result = finished(top, total, sums, sinks, q_head, used, v_scale, HAS_SINKS)
        o_at = (begin + query)[:, None].to(tl.int64) * (HEADS * GROUP * D) + q_head[:, None] * D + dim[None, :]
        tl.store(out + o_at, result.to(out.dtype.element_ty), mask=used[:, None] & (dim < D)[None, :])


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
    row_tiles = _row_tiles(starts, num_rows, PER, QUERIES, ROWS)
    live = tl.sum(row_tiles, 0)
    most = _most_parts(live * HEADS, SPLITS, SLOTS)
    dim = tl.arange(0, D_PAD)
    for work in range(tl.program_id(0), live * HEADS * PIECES, tl.num_programs(0)):
        tile, head = work // PIECES // HEADS, work // PIECES % HEADS
        _, begin, count, length, first_query = _place(starts, lengths, row_tiles, tile, PER, ROWS)
        _, _, start, stop = _reach(length - count + first_query, length, PER, N, WINDOW, CHUNKED)
        parts = _parts(start, stop, most, LEAST)
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
