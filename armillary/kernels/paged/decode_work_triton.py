"""How split-KV attention over pages divides a batch among workers, and what a worker prefetches before its first tile.

Work is the list of all (sequence, KV head, key tile), in that order; worker w takes tiles [w·per, (w+1)·per).
"""

import triton
import triton.language as tl

from armillary.kernels.core.prefetch_triton import fetch
from armillary.kernels.paged.softmax_triton import first_key

# N keys of a tile, D head dim


@triton.jit
def row_of(starts, lengths, b, num_rows, QUERIES: tl.constexpr, CACHE: tl.constexpr):
    """First query, number of queries and keys of row b; none where the row is not for this kernel."""
    there = b < num_rows
    begin = tl.load(starts + b, mask=there, other=0, cache_modifier=CACHE)
    count = tl.load(starts + b + 1, mask=there, other=0, cache_modifier=CACHE) - begin
    length = tl.load(lengths + b, mask=there, other=0, cache_modifier=CACHE)
    is_split = (count > 0) & (count <= QUERIES)
    return begin, tl.where(is_split, count, 0), tl.where(is_split, length, 0)


@triton.jit
def lowest_key(count, length, WINDOW: tl.constexpr, CHUNKED: tl.constexpr):
    """The first key that any query of a row sees."""
    return first_key(tl.maximum(length - count, 0), WINDOW, CHUNKED)


@triton.jit
def first_key_tile(count, length, N: tl.constexpr, WINDOW: tl.constexpr, CHUNKED: tl.constexpr):
    return lowest_key(count, length, WINDOW, CHUNKED) // N


@triton.jit
def num_key_tiles(first_tile, length, N: tl.constexpr):
    """Tiles of a row, at least one."""
    return tl.maximum((length + N - 1) // N - first_tile, 1)


@triton.jit
def worker_range(
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
    _, count, length = row_of(starts, lengths, row, num_rows, QUERIES, CACHE)
    first = first_key_tile(count, length, N, WINDOW, CHUNKED)
    tiles = tl.where(row < num_rows, num_key_tiles(first, length, N), 0)
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
def prefetch_lists(
    tables, starts, lengths, num_rows, table_pages, worker, num_workers, table_stride, ROWS: tl.constexpr
):
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
def prefetch_keys(
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
    _, _, _, b, inside = worker_range(
        starts, lengths, num_rows, worker, num_workers, N, WINDOW, CHUNKED, QUERIES, ROWS, HEADS, ".cg"
    )
    b = _within(b, num_rows)
    _, count, length = row_of(starts, lengths, b, num_rows, QUERIES, ".cg")
    first = first_key_tile(count, length, N, WINDOW, CHUNKED)
    tiles = num_key_tiles(first, length, N)
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
