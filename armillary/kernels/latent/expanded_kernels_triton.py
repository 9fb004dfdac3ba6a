"""Latent attention of prefill chunks: rows of the cache gathered from their pages, and attention over expanded keys and
values of packed sequences.

The queries of all sequences are packed, and so are their keys. A program takes a tile of queries of one head and finds
its sequence by where queries start. Keys before the first query of the tile need no causal mask and have a loop of
their own.
"""

import triton
import triton.language as tl

from armillary.kernels.paged.softmax_triton import finished, weighed

# M queries and N keys of a tile, P and R key dims without and with rotary positions, V value dims


@triton.jit(do_not_specialize=["num_rows"])
def gather(
    cache,
    tables,
    lengths,
    out,
    num_rows,
    page_stride,
    slot_stride,
    table_stride,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    N: tl.constexpr,
):
    """Rows of N packed keys: key j belongs to the sequence in whose range of the summed lengths it lies."""
    row, e = tl.arange(0, ROWS), tl.arange(0, E_PAD)
    upto = tl.cumsum(tl.load(lengths + row, mask=row < num_rows, other=0), 0)
    key = tl.program_id(0) * N + tl.arange(0, N)
    before = upto[None, :] <= key[:, None]
    there = key < tl.max(upto, 0)
    b = tl.where(there, tl.sum(before.to(tl.int32), 1), 0)
    inside = key - tl.max(tl.where(before, upto[None, :], 0), 1)
    page = tl.load(tables + b.to(tl.int64) * table_stride + inside // PAGE, mask=there, other=0).to(tl.int64)
    mask = there[:, None] & (e < E)[None, :]
    x = tl.load(cache + (page * page_stride + (inside % PAGE) * slot_stride)[:, None] + e[None, :], mask=mask)
    tl.store(out + key[:, None].to(tl.int64) * E + e[None, :], x, mask=mask)


@triton.jit
def _tiles(
    q_MP,
    q_MR,
    top,
    total,
    sums,
    kv,
    key_ropes,
    start,
    stop,
    length,
    position,
    factor,
    kv_stride,
    rope_stride,
    P: tl.constexpr,
    P_PAD: tl.constexpr,
    R: tl.constexpr,
    R_PAD: tl.constexpr,
    V: tl.constexpr,
    V_PAD: tl.constexpr,
    N: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Online softmax over key tiles [start, stop); MASKED where a tile may hold keys that some query must not see."""
    p, r, v = tl.arange(0, P_PAD), tl.arange(0, R_PAD), tl.arange(0, V_PAD)
    for tile in range(start, stop):
        key = tile * N + tl.arange(0, N)
        k_at, r_at = kv + key[:, None].to(tl.int64) * kv_stride, key_ropes + key[:, None].to(tl.int64) * rope_stride
        if MASKED:
            there = (key < length)[:, None]
            k_NP = tl.load(k_at + p[None, :], mask=there & (p < P)[None, :], other=0.0)
            k_NR = tl.load(r_at + r[None, :], mask=there & (r < R)[None, :], other=0.0)
            v_NV = tl.load(k_at + P + v[None, :], mask=there & (v < V)[None, :], other=0.0)
        elif P_PAD > P or R_PAD > R or V_PAD > V:
            k_NP = tl.load(k_at + p[None, :], mask=(p < P)[None, :], other=0.0)
            k_NR = tl.load(r_at + r[None, :], mask=(r < R)[None, :], other=0.0)
            v_NV = tl.load(k_at + P + v[None, :], mask=(v < V)[None, :], other=0.0)
        else:
            k_NP, k_NR = tl.load(k_at + p[None, :]), tl.load(r_at + r[None, :])
            v_NV = tl.load(k_at + P + v[None, :])
        scores = tl.dot(q_MP, tl.trans(k_NP), input_precision=PRECISION)
        scores = tl.dot(q_MR, tl.trans(k_NR), scores, input_precision=PRECISION)
        if MASKED:
            seen = (key < length)[None, :] & (key[None, :] <= position[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        top, total, weights, rescale = weighed(top, total, scores, factor, MASKED, False)
        sums = tl.dot(weights.to(v_NV.dtype), v_NV, sums * rescale[:, None], input_precision=PRECISION)
    return top, total, sums


@triton.jit
def _place(starts, lengths, num_rows, tile, M: tl.constexpr, ROWS: tl.constexpr):
    """First query in the batch, number of queries and keys, and first packed key of a tile's sequence, and the tile's
    first query within it; no queries where there are fewer tiles."""
    row = tl.arange(0, ROWS)
    begin = tl.load(starts + row, mask=row < num_rows, other=0)
    count = tl.load(starts + row + 1, mask=row < num_rows, other=0) - begin
    length = tl.load(lengths + row, mask=row < num_rows, other=0)
    tiles = (count + M - 1) // M
    upto = tl.cumsum(tiles, 0)
    here = (upto > tile) & (upto - tiles <= tile)
    first_key = tl.sum(tl.where(upto <= tile, length, 0), 0)
    return (
        tl.sum(tl.where(here, begin, 0), 0),
        tl.sum(tl.where(here, count, 0), 0),
        tl.sum(tl.where(here, length, 0), 0),
        first_key,
        (tile - tl.sum(tl.where(here, upto - tiles, 0), 0)) * M,
    )


@triton.jit(do_not_specialize=["num_rows", "num_tiles"])
def prefill(
    q,
    q_rope,
    kv,
    rows,
    starts,
    lengths,
    out,
    scale,
    num_rows,
    num_tiles,
    q_stride,
    q_head_stride,
    rope_stride,
    rope_head_stride,
    kv_stride,
    kv_head_stride,
    row_stride,
    out_stride,
    out_head_stride,
    P: tl.constexpr,
    P_PAD: tl.constexpr,
    R: tl.constexpr,
    R_PAD: tl.constexpr,
    V: tl.constexpr,
    V_PAD: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (tile of queries, head). q [T, N, P], q_rope [T, N, R], kv [keys, N, P + V], rows [keys, R], out [T, N,
    V]. Late queries see most keys: their programs begin first."""
    head, tile = tl.program_id(0) // num_tiles, num_tiles - 1 - tl.program_id(0) % num_tiles
    begin, count, length, first_key, first_query = _place(starts, lengths, num_rows, tile, M, ROWS)
    if count == 0:
        return
    query = first_query + tl.arange(0, M)
    used, position, token = query < count, length - count + query, (begin + query)[:, None].to(tl.int64)
    p, r, v = tl.arange(0, P_PAD)[None, :], tl.arange(0, R_PAD)[None, :], tl.arange(0, V_PAD)[None, :]
    q_MP = tl.load(q + token * q_stride + head * q_head_stride + p, mask=used[:, None] & (p < P), other=0.0)
    q_MR = tl.load(q_rope + token * rope_stride + head * rope_head_stride + r, mask=used[:, None] & (r < R), other=0.0)
    kv += first_key.to(tl.int64) * kv_stride + head * kv_head_stride
    rows += first_key.to(tl.int64) * row_stride
    top, total = tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32)
    sums, factor = tl.zeros([M, V_PAD], tl.float32), scale * 1.4426950408889634
    first_position = length - count + first_query
    stop = (tl.minimum(length, first_position + M) + N - 1) // N
    clear_stop = tl.maximum(tl.minimum((first_position + 1) // N, stop), 0)
    top, total, sums = _tiles(
        q_MP,
        q_MR,
        top,
        total,
        sums,
        kv,
        rows,
        0,
        clear_stop,
        length,
        position,
        factor,
        kv_stride,
        row_stride,
        P,
        P_PAD,
        R,
        R_PAD,
        V,
        V_PAD,
        N,
        False,
        PRECISION,
    )
    top, total, sums = _tiles(
        q_MP,
        q_MR,
        top,
        total,
        sums,
        kv,
        rows,
        clear_stop,
        stop,
        length,
        position,
        factor,
        kv_stride,
        row_stride,
        P,
        P_PAD,
        R,
        R_PAD,
        V,
        V_PAD,
        N,
        True,
        PRECISION,
    )
    result = finished(top, total, sums, out, query, used, 1.0, False)
    to = out + token * out_stride + head * out_head_stride + v
    tl.store(to, result.to(out.dtype.element_ty), mask=used[:, None] & (v < V))
