"""Which queries and keys a program of the prefill kernels works on.

The queries of all sequences are packed: a tile finds its sequence by where queries start. Where tiles are too few for
the GPU, several programs share the keys of one.
"""

import triton
import triton.language as tl

from armillary.kernels.paged.softmax_triton import first_key

# PER queries and N keys of a tile, ROWS sequences at most


@triton.jit
def query_tiles(starts, num_rows, PER: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr):
    """Tiles of queries of every row [ROWS]; none where a row is left to `decode`."""
    rows = tl.arange(0, ROWS)
    counts = tl.load(starts + rows + 1, mask=rows < num_rows, other=0)
    counts -= tl.load(starts + rows, mask=rows < num_rows, other=0)
    return tl.where(counts > QUERIES, (counts + PER - 1) // PER, 0)


@triton.jit
def tile_place(starts, lengths, row_tiles, tile, PER: tl.constexpr, ROWS: tl.constexpr):
    """Row, first query in the batch, number of queries and keys of a tile, and its first query within the row."""
    upto, rows = tl.cumsum(row_tiles, 0), tl.arange(0, ROWS)
    b = tl.sum((upto <= tile).to(tl.int32), 0)
    begin, length = tl.load(starts + b), tl.load(lengths + b)
    count = tl.load(starts + b + 1) - begin
    return b, begin, count, length, (tile - tl.sum(tl.where(rows == b, upto - row_tiles, 0), 0)) * PER


@triton.jit
def key_reach(first_position, length, PER: tl.constexpr, N: tl.constexpr, WINDOW: tl.constexpr, CHUNKED: tl.constexpr):
    """First key that a tile's queries see, one past the last, and the key tiles [start, stop) of these."""
    upto = tl.minimum(length, first_position + PER)
    lowest = first_key(first_position, WINDOW, CHUNKED)
    return lowest, upto, lowest // N, (upto + N - 1) // N


@triton.jit
def most_parts(work, SPLITS: tl.constexpr, SLOTS: tl.constexpr):
    """How many programs share the keys of a tile at most, for `work` tiles and heads: the number up to SPLITS that
    fills whole waves of the SLOTS concurrent programs best; of several equal ones, the smallest."""
    number = tl.arange(1, SPLITS + 1)
    programs = number * tl.maximum(work, 1)
    used = programs * 1000 // ((programs + SLOTS - 1) // SLOTS * SLOTS) - 10 * number
    return tl.min(tl.where(used == tl.max(used, 0), number, SPLITS), 0)


@triton.jit
def num_parts(start, stop, most, LEAST: tl.constexpr):
    """The same for one tile, where each program gets at least LEAST key tiles."""
    return tl.minimum(tl.maximum((stop - start) // LEAST, 1), most)
