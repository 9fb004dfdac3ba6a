"""The split kernel of `absorbed_kernels_triton` for tiles of 64 rows on Hopper, where arithmetic bounds it: two
warpgroups share a tile of 64 keys, each scores half of them and sums up half of the value columns.

Written in Gluon, because Triton lets both warpgroups compute all scores. The tile serves as keys and as values: keys of
the next tile are loaded while this one is scored, weighed and summed up. Q, two tiles of keys and the weights fill
shared memory (227 KB).
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from armillary.kernels.latent.absorbed_kernels_triton import first_work

M, N, WARPS = 64, 64, 8
PLANNED = 6  # numbers per worker


@triton.jit(do_not_specialize=["num_rows"])
def plan(
    starts,
    lengths,
    planned,
    shared,
    num_rows,
    num_workers,
    N: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    PLANNED: tl.constexpr,
):
    """Where each worker begins and stops."""
    worker = tl.program_id(0)
    per, begin, stop, b, inside, num_blocks = first_work(
        starts, lengths, num_rows, worker, num_workers, N, QUERIES, ROWS
    )
    at = planned + worker * PLANNED
    tl.store(at, per)
    tl.store(at + 1, begin)
    tl.store(at + 2, stop)
    tl.store(at + 3, b)
    tl.store(at + 4, inside)
    tl.store(at + 5, num_blocks)
    tl.store(shared + worker * 5, 0)


@gluon.jit
def _pages(table, tile, end, length, row, N: gl.constexpr, PAGE: gl.constexpr):
    """Pages of the keys `row` of a tile: one number where a tile never crosses a page, else one per key; keys that do
    not exist are replaced by the last."""
    there = (tile < end) & (length > 0)
    if PAGE % N == 0:
        return gl.load(table + tile * N // PAGE, mask=there, other=0).to(gl.int64)
    else:
        key = gl.minimum(tile * N + row, gl.maximum(length - 1, 0))
        return gl.load(table + key // PAGE, mask=(key >= 0) & there, other=0).to(gl.int64)


@gluon.jit
def _copy(
    to,
    cache,
    page,
    tile,
    length,
    row,
    column,
    page_stride,
    slot_stride,
    N: gl.constexpr,
    PAGE: gl.constexpr,
):
    """Start to copy columns of a tile of keys into shared memory."""
    key = gl.minimum(tile * N + row, gl.maximum(length - 1, 0))
    at = page * page_stride + (key % PAGE) * slot_stride
    async_copy.async_copy_global_to_shared(to, cache + at[:, None] + column[None, :])


@gluon.jit
def _query(to, q, token, head, used, stride, head_stride, column):
    """Query rows into shared memory; zeros where there are none."""
    at = token[:, None].to(gl.int64) * stride + head[:, None] * head_stride + column[None, :]
    to.store(gl.load(q + at, mask=used[:, None] & (column >= 0)[None, :], other=0.0))


@gluon.jit(do_not_specialize=["num_rows", "num_tokens"])
def decode_wgmma(
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
    planned,
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
    HEADS: gl.constexpr,
    QUERIES: gl.constexpr,
    TILES: gl.constexpr,
    C: gl.constexpr,
    R: gl.constexpr,
    PAGE: gl.constexpr,
    M: gl.constexpr,
    N: gl.constexpr,
    PLANNED: gl.constexpr,
):
    """Arguments as of `absorbed_kernels_triton.decode`; `planned` is what `plan` wrote."""
    kind: gl.constexpr = cache.dtype.element_ty
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, C // 2, 16])
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, N // 2, 16])
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])  # a warp copies 512 bytes of a row
    NARROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    wide_row, wide_column = gl.arange(0, N, gl.SliceLayout(1, WIDE)), gl.arange(0, C, gl.SliceLayout(0, WIDE))
    rope_row, rope_column = gl.arange(0, N, gl.SliceLayout(1, NARROW)), gl.arange(0, R, gl.SliceLayout(0, NARROW))
    score_row, score_key = gl.arange(0, M, gl.SliceLayout(1, SCORES)), gl.arange(0, N, gl.SliceLayout(0, SCORES))
    sum_row, sum_column = gl.arange(0, M, gl.SliceLayout(1, SUMS)), gl.arange(0, C, gl.SliceLayout(0, SUMS))

    q_tile = gl.allocate_shared_memory(kind, [M, C], TILE)
    rope_tile = gl.allocate_shared_memory(kind, [M, R], TILE)
    keys = gl.allocate_shared_memory(kind, [2, N, C], TILE)
    key_ropes = gl.allocate_shared_memory(kind, [2, N, R], TILE)
    weights = gl.allocate_shared_memory(kind, [M, N], TILE)

    factor = scale * 1.4426950408889634
    worker, member = gl.program_id(0) // TILES, gl.program_id(0) % TILES
    per, at_first = gl.load(planned + worker * PLANNED), gl.load(planned + worker * PLANNED + 1)
    stop, b = gl.load(planned + worker * PLANNED + 2), gl.load(planned + worker * PLANNED + 3)
    inside, num_blocks = gl.load(planned + worker * PLANNED + 4), gl.load(planned + worker * PLANNED + 5)
    at_tile = at_first
    for _ in range(num_blocks):
        begin = gl.load(starts + b)
        count = gl.load(starts + b + 1) - begin
        length = gl.where(count > 0, gl.load(lengths + b), 0)
        tiles = gl.maximum((length + N - 1) // N, 1)
        block, tile = inside // tiles, inside % tiles
        end = gl.minimum(tiles, tile + stop - at_tile)
        table = tables + b.to(gl.int64) * table_stride

        page, rope_page = (
            _pages(table, tile, end, length, wide_row, N, PAGE),
            _pages(table, tile, end, length, rope_row, N, PAGE),
        )
        _copy(keys.index(0), cache, page, tile, length, wide_row, wide_column, page_stride, slot_stride, N, PAGE)
        _copy(
            key_ropes.index(0),
            cache + C,
            rope_page,
            tile,
            length,
            rope_row,
            rope_column,
            page_stride,
            slot_stride,
            N,
            PAGE,
        )
        async_copy.commit_group()
        page, rope_page = (
            _pages(table, tile + 1, end, length, wide_row, N, PAGE),
            _pages(table, tile + 1, end, length, rope_row, N, PAGE),
        )
        row = member * M + wide_row
        query = block * QUERIES + row // HEADS
        used = (query < count) & (row < QUERIES * HEADS)
        _query(q_tile, q, begin + query, row % HEADS, used, q_stride, q_head_stride, wide_column)
        row = member * M + rope_row
        query = block * QUERIES + row // HEADS
        used = (query < count) & (row < QUERIES * HEADS)
        _query(rope_tile, q_rope, begin + query, row % HEADS, used, rope_stride, rope_head_stride, rope_column)
        row = member * M + score_row
        position = length - count + block * QUERIES + row // HEADS

        top = gl.full([M], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
        totals = gl.zeros([M, N], gl.float32, SCORES)
        sums = gl.zeros([M, C], gl.float32, SUMS)
        for i in range(tile, end):
            buffer = (i - tile) % 2
            async_copy.wait_group(0)
            fence_async_shared()
            key_tile = keys.index(buffer)
            scores = gl.zeros([M, N], gl.float32, SCORES)
            scores_async = warpgroup_mma(q_tile, key_tile.permute((1, 0)), scores, use_acc=False, is_async=True)
            scores_async = warpgroup_mma(
                rope_tile, key_ropes.index(buffer).permute((1, 0)), scores_async, is_async=True
            )
            if i + 1 < end:  # the tile before is summed up: its place is free
                to = 1 - buffer
                _copy(
                    keys.index(to), cache, page, i + 1, length, wide_row, wide_column, page_stride, slot_stride, N, PAGE
                )
                _copy(
                    key_ropes.index(to),
                    cache + C,
                    rope_page,
                    i + 1,
                    length,
                    rope_row,
                    rope_column,
                    page_stride,
                    slot_stride,
                    N,
                    PAGE,
                )
            async_copy.commit_group()
            page, rope_page = (
                _pages(table, i + 2, end, length, wide_row, N, PAGE),
                _pages(table, i + 2, end, length, rope_row, N, PAGE),
            )
            scores = warpgroup_mma_wait(0, deps=[scores_async])
            key = i * N + score_key
            seen = (key < length)[None, :] & (key[None, :] <= position[:, None])
            scores = gl.where(seen, scores * factor, float("-inf"))
            new_top = gl.maximum(top, gl.max(scores, 1))
            safe = gl.where(new_top == float("-inf"), 0.0, new_top)
            weight = gl.exp2(scores - safe[:, None])
            rescale = gl.exp2(top - safe)
            totals = totals * rescale[:, None] + weight
            top = new_top
            weights.store(weight.to(kind))
            fence_async_shared()
            sums = sums * gl.convert_layout(rescale, gl.SliceLayout(1, SUMS))[:, None]
            sums = warpgroup_mma_wait(0, deps=[warpgroup_mma(weights, key_tile, sums, is_async=True)])
        async_copy.wait_group(0)

        total = gl.sum(totals, 1)
        row = member * M + sum_row
        query, head = block * QUERIES + row // HEADS, row % HEADS
        used = (query < count) & (row < QUERIES * HEADS)
        row_first = at_tile - tile
        if (tile == 0) & (end == tiles):
            over = gl.convert_layout(total, gl.SliceLayout(1, SUMS))
            result = gl.where((over != 0.0)[:, None], sums / gl.where(over == 0.0, 1.0, over)[:, None], 0.0)
            at = (begin + query)[:, None].to(gl.int64) * (HEADS * C) + head[:, None] * C + sum_column[None, :]
            gl.store(out + at, result.to(kind), mask=used[:, None] & (sum_column >= 0)[None, :])
        else:
            slot = 2 * worker + (row_first > at_first).to(gl.int32)
            peak = peaks + slot * (2 * TILES * M) + member * M + score_row
            gl.store(peak, top)
            gl.store(peak + TILES * M, total)
            gl.store(partial + (slot * (TILES * M) + row[:, None]) * C + sum_column[None, :], sums)
            if tile == 0:
                gl.store(shared + worker * 5, (row_first + tiles - 1) // per - worker + 1)
                gl.store(shared + worker * 5 + 1, slot)
                gl.store(shared + worker * 5 + 2, begin + block * QUERIES)
                gl.store(shared + worker * 5 + 3, gl.minimum(count - block * QUERIES, QUERIES))
                gl.store(shared + worker * 5 + 4, 0)
        at_tile += end - tile
        inside += end - tile
        is_last = inside >= tiles * gl.maximum((count + QUERIES - 1) // QUERIES, 1)
        b, inside = gl.where(is_last, b + 1, b), gl.where(is_last, 0, inside)

    for token in range(gl.load(starts + num_rows) + worker, num_tokens, gl.num_programs(0) // TILES):
        for head in range(member, HEADS, TILES):  # padding gets zeros
            at = out + (wide_column * 0 + token).to(gl.int64) * (HEADS * C) + head * C + wide_column
            gl.store(at, gl.zeros([C], kind, gl.SliceLayout(0, WIDE)))
