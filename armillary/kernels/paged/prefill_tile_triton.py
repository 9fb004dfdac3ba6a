"""One tile of a prefill chunk: its queries over the keys they see, in pages. Rows of a tile are (query, head of the
group); keys before the first query of the chunk need no causal mask and have their own loop.
"""

import triton
import triton.language as tl

from armillary.kernels.paged.softmax_triton import absorbed, finished, first_key, pages_of, positive, scores_of


@triton.jit
def _whole_pages(table, tile, stop, N: tl.constexpr, PAGE: tl.constexpr):
    """Pages of a tile's keys, all of which exist, where a tile is so many pages."""
    return tl.load(table + tile * (N // PAGE) + tl.arange(0, N) // PAGE, mask=tile < stop, other=0)


@triton.jit
def _key_tiles(
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
def attend_tile(
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
        top, total, sums = _key_tiles(
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
    top, total, sums = _key_tiles(
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
    top, total, sums = _key_tiles(
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
