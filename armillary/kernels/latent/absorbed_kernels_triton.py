"""Split-KV attention of absorbed queries over pages of latents: the work of a batch in equal ranges of key tiles.

Work is the list of all (sequence, block of queries, key tile), in that order; worker w takes tiles [w·per, (w+1)·per)
for any lengths, so every multiprocessor reads as many bytes and the grid never depends on device data. The (query,
head) rows of a block of queries are TILES tiles of M rows, computed by as many neighbouring programs at the same time:
the first brings the keys into L2, where the others find them. Where several workers share a block, each writes a
partial softmax, and `combine` adds them up in a fixed order.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from armillary.kernels.paged.softmax_triton import finished, pages_of, places_of, weighed

# M rows (query, head), N keys of a tile, C rank of the latent, R dims with rotary positions


@triton.jit
def row_of(starts, lengths, b, num_rows):
    """First query, number of queries and keys of sequence b."""
    there = b < num_rows
    begin = tl.load(starts + b, mask=there, other=0)
    count = tl.load(starts + b + 1, mask=there, other=0) - begin
    length = tl.load(lengths + b, mask=there, other=0)
    return begin, count, tl.where(count > 0, length, 0)


@triton.jit
def key_tiles(length, N: tl.constexpr):
    """Key tiles of a sequence, at least one: so that every block of queries is written."""
    return tl.maximum((length + N - 1) // N, 1)


@triton.jit
def query_blocks(count, QUERIES: tl.constexpr):
    """Blocks of queries of a sequence; one without queries counts as well, which keeps the search for a worker's first
    sequence simple, and writes nothing."""
    return tl.maximum((count + QUERIES - 1) // QUERIES, 1)


@triton.jit
def evenly(per, most):
    """Tiles per worker, a few more than `per` where that splits blocks of `most` tiles into equal parts, or not at all:
    adding up parts costs more than idle workers."""
    rounded = tl.where(per <= most, (most + most // per - 1) // (most // per), (per + most - 1) // most * most)
    return tl.where(rounded - per <= per // 28, rounded, per)


@triton.jit
def first_work(
    starts, lengths, num_rows, worker, num_workers, N: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr
):
    """Tiles per worker, a worker's first and last, its sequence, how many tiles of that come before, and on how many
    blocks it works."""
    row = tl.arange(0, ROWS)
    _, count, length = row_of(starts, lengths, row, num_rows)
    of_block, blocks = key_tiles(length, N), tl.where(row < num_rows, query_blocks(count, QUERIES), 0)
    tiles = of_block * blocks
    total, most = tl.sum(tiles, 0), tl.max(tl.where(row < num_rows, of_block, 0), 0)
    per = tl.maximum((total + num_workers - 1) // num_workers, 1)
    if tl.min(tl.where(row < num_rows, of_block, most), 0) == most:  # all sequences alike
        per = evenly(per, most)
    begin, stop, upto = worker * per, tl.minimum((worker + 1) * per, total), tl.cumsum(tiles, 0)
    b, inside, first_block = _find(upto, tiles, of_block, blocks, begin)
    _, _, last_block = _find(upto, tiles, of_block, blocks, stop - 1)
    return per, begin, stop, b, inside, tl.where(begin < stop, last_block - first_block + 1, 0)


@triton.jit
def _find(upto, tiles, of_block, blocks, at):
    """Sequence of a tile of the list, its number within the sequence, and the number of its block within the list."""
    before, here = upto <= at, (upto > at) & (upto - tiles <= at)
    b, blocks_before = tl.sum(before.to(tl.int32), 0), tl.sum(tl.where(before, blocks, 0), 0)
    inside = at - tl.max(tl.where(before, upto, 0), 0)
    return b, inside, blocks_before + inside // tl.maximum(tl.sum(tl.where(here, of_block, 0), 0), 1)


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def decode(
    q,
    q_rope,
    cache,
    tables,
    starts,
    lengths,
    out,
    partial,
    peaks,
    shared,
    scale,
    num_rows,
    num_tokens,
    q_stride,
    q_head_stride,
    rope_stride,
    rope_head_stride,
    page_stride,
    slot_stride,
    table_stride,
    HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    C: tl.constexpr,
    C_PAD: tl.constexpr,
    R: tl.constexpr,
    R_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):
    """q, out [T, HEADS, C], q_rope [T, HEADS, R]. A worker writes at most two partial results, of its first
    and its last block; `shared` marks one that begins here."""
    LOG2E: tl.constexpr = 1.4426950408889634
    worker, num_workers = tl.program_id(0) // TILES, tl.num_programs(0) // TILES
    m_row = tl.program_id(0) % TILES * M + tl.arange(0, M)
    c, r = tl.arange(0, C_PAD), tl.arange(0, R_PAD)
    if EARLY:
        gdc_wait()
    per, at_first, stop, b, inside, num_blocks = first_work(
        starts, lengths, num_rows, worker, num_workers, N, QUERIES, ROWS
    )
    tl.store(shared + worker * 5, 0)
    at_tile = at_first
    for _ in range(num_blocks):
        begin, count, length = row_of(starts, lengths, b, num_rows)
        tiles = key_tiles(length, N)
        block, tile = inside // tiles, inside % tiles
        end = tl.minimum(tiles, tile + stop - at_tile)
        query, head = block * QUERIES + m_row // HEADS, m_row % HEADS
        used = (query < count) & (m_row < QUERIES * HEADS)
        position = length - count + query
        token = (begin + query)[:, None].to(tl.int64)
        q_MC = tl.load(
            q + token * q_stride + head[:, None] * q_head_stride + c[None, :],
            mask=used[:, None] & (c < C)[None, :],
            other=0.0,
        )
        q_MR = tl.load(
            q_rope + token * rope_stride + head[:, None] * rope_head_stride + r[None, :],
            mask=used[:, None] & (r < R)[None, :],
            other=0.0,
        )
        table = tables + b.to(tl.int64) * table_stride
        page = pages_of(table, tile, end, 0, length, N, PAGE)
        top, totals = tl.full([M], float("-inf"), tl.float32), tl.zeros([M, N], tl.float32)
        sums = tl.zeros([M, C_PAD], tl.float32)
        for i in range(tile, end):
            next_page = pages_of(table, i + 1, end, 0, length, N, PAGE)
            rows = cache + (page * page_stride + places_of(i, 0, length, N, PAGE) * slot_stride)[:, None]
            if C_PAD > C:
                k_NC = tl.load(rows + c[None, :], mask=(c < C)[None, :], other=0.0)
            else:
                k_NC = tl.load(rows + c[None, :])
            if R_PAD > R:
                k_NR = tl.load(rows + C + r[None, :], mask=(r < R)[None, :], other=0.0)
            else:
                k_NR = tl.load(rows + C + r[None, :])
            scores = tl.dot(q_MC, tl.trans(k_NC), input_precision=PRECISION)
            scores = tl.dot(q_MR, tl.trans(k_NR), scores, input_precision=PRECISION)
            key = i * N + tl.arange(0, N)
            scores = tl.where((key < length)[None, :] & (key[None, :] <= position[:, None]), scores, float("-inf"))
            top, totals, weights, rescale = weighed(top, totals, scores, scale * LOG2E, True, True)
            sums = tl.dot(weights.to(k_NC.dtype), k_NC, sums * rescale[:, None], input_precision=PRECISION)
            page = next_page

        total, row_first = tl.sum(totals, 1), at_tile - tile
        if (tile == 0) & (end == tiles):
            result = finished(top, total, sums, out, head, used, 1.0, False)
            o_at = token * (HEADS * C) + head[:, None] * C + c[None, :]
            tl.store(out + o_at, result.to(out.dtype.element_ty), mask=used[:, None] & (c < C)[None, :])
        else:
            slot = 2 * worker + (row_first > at_first).to(tl.int32)
            tl.store(peaks + slot * (2 * TILES * M) + m_row, top)
            tl.store(peaks + slot * (2 * TILES * M) + TILES * M + m_row, total)
            tl.store(partial + (slot * (TILES * M) + m_row[:, None]) * C_PAD + c[None, :], sums)
            if tile == 0:
                tl.store(shared + worker * 5, (row_first + tiles - 1) // per - worker + 1)
                tl.store(shared + worker * 5 + 1, slot)
                tl.store(shared + worker * 5 + 2, begin + block * QUERIES)
                tl.store(shared + worker * 5 + 3, tl.minimum(count - block * QUERIES, QUERIES))
                tl.store(shared + worker * 5 + 4, 0)
        at_tile += end - tile
        inside += end - tile
        is_last = inside >= tiles * query_blocks(count, QUERIES)
        b, inside = tl.where(is_last, b + 1, b), tl.where(is_last, 0, inside)

    if EARLY:
        gdc_launch_dependents()
    for token_left in range(tl.load(starts + num_rows) + worker, num_tokens, num_workers):  # padding gets zeros
        for left_head in range(tl.program_id(0) % TILES, HEADS, TILES):
            at = (c * 0 + token_left).to(tl.int64) * (HEADS * C) + left_head * C + c
            tl.store(out + at, tl.zeros([C_PAD], out.dtype.element_ty), mask=c < C)


@triton.jit(do_not_specialize=["num_workers"])
def combine(
    partial,
    peaks,
    shared,
    out,
    num_workers,
    WORKERS: tl.constexpr,
    HEADS: tl.constexpr,
    C: tl.constexpr,
    C_PAD: tl.constexpr,
    M: tl.constexpr,
    W: tl.constexpr,
    PARTS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Partial softmaxes of workers that share a block of queries, added up in a fixed order. Program (shared block, row
    of the block, W columns); M rows per block."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    number = tl.arange(0, WORKERS)
    starting = tl.load(shared + number * 5, mask=number < num_workers, other=0) > 0
    here = starting & (tl.cumsum(starting.to(tl.int32), 0) == tl.program_id(0) + 1)
    if tl.sum(here.to(tl.int32), 0) == 0:
        return
    worker, row = tl.sum(tl.where(here, number, 0), 0), tl.program_id(1)
    about = shared + worker * 5
    num_parts, first_slot, begin, count = tl.load(about), tl.load(about + 1), tl.load(about + 2), tl.load(about + 3)
    if row >= count * HEADS:
        return
    c = tl.program_id(2) * W + tl.arange(0, W)
    top, total, sums = tl.full([1], float("-inf"), tl.float32), tl.zeros([1], tl.float32), tl.zeros([W], tl.float32)
    for base in range(0, num_parts, PARTS):
        part = base + tl.arange(0, PARTS)
        there, slot = part < num_parts, tl.where(part == 0, first_slot, 2 * (worker + part))
        at = slot * M + row
        values = tl.load(partial + at[:, None] * C_PAD + c[None, :], mask=there[:, None], other=0.0)
        tops = tl.load(peaks + at + slot * M, mask=there, other=float("-inf"))
        totals = tl.load(peaks + at + slot * M + M, mask=there, other=0.0)
        new_top = tl.maximum(top, tl.max(tops, 0))
        safe = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight, rescale = tl.exp2(tops - safe), tl.exp2(top - safe)
        sums = sums * rescale + tl.sum(values * weight[:, None], 0)
        total = total * rescale + tl.sum(totals * weight, 0)
        top = new_top
    sums = sums / tl.where(total == 0.0, 1.0, total)
    to = out + (begin + row // HEADS).to(tl.int64) * (HEADS * C) + row % HEADS * C + c
    tl.store(to, sums.to(out.dtype.element_ty), mask=c < C)
