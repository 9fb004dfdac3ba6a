"""Absorbed latent attention on a GPU: a split-KV launch, and one that adds up what was split.

The launches depend on shapes and on `max_query` only, never on device data, so a CUDA graph that holds them serves any
lengths.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from armillary.kernels.core.launch import (
    can_start_early,
    ceil_div,
    early_launch,
    first_fitting,
    is_bare,
    num_programs,
    on,
    power_of_two,
)
from armillary.kernels.latent.absorbed_kernels_triton import combine, decode
from armillary.kernels.paged.paged_attention import PagedBatch
from armillary.machine.accelerator import accelerator_of


@dataclass(frozen=True, kw_only=True)
class LatentTiling:
    """Sizes of a launch."""

    m: int  # rows (query, head) of a tile
    n: int  # keys of a tile
    warps: int  # per program
    stages: int  # of the load pipeline
    workers: int  # programs per multiprocessor
    queries: int = 1  # of a block
    tiles: int = 1  # of a block
    warpgroups: bool = False  # whether it is the kernel for Hopper's warpgroup MMAs


def latent_decode(q_TNC: Tensor, q_TNR: Tensor, cache: Tensor, batch: PagedBatch, scale: float) -> Tensor:
    """See `armillary.kernels.latent.latent_decode.latent_decode`."""
    return (_launched if is_bare(q_TNC) else _latent_decode)(
        q_TNC, q_TNR, cache, batch.tables_BP, batch.starts, batch.lengths_B, scale, batch.max_query
    )


def _launched(
    q: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    tables: Tensor,
    starts: Tensor,
    lengths: Tensor,
    scale: float,
    max_query: int,
) -> Tensor:
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    num_rows = tables.shape[0]
    if not num_rows or not q.numel():
        return out.zero_()
    q, q_rope, cache, tables = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, q_rope, cache, tables))
    if scale <= 0:  # kernels take the maximum before they multiply by the scale
        q, q_rope, scale = (-q, -q_rope, -scale) if scale < 0 else (q * 0.0, q_rope * 0.0, 1.0)
    tiling = split_tiling(q.device, q.shape[1], max_query, q.shape[2], q_rope.shape[2], q.dtype)
    with on(q):
        blocks = ceil_div(max_query, tiling.queries)
        _launch(q, q_rope, cache, tables, starts.contiguous(), lengths.contiguous(), out, scale, tiling, blocks)
    return out


_latent_decode = torch.library.custom_op("armillary::latent_decode", _launched, mutates_args=())


@_latent_decode.register_fake
def _(q, q_rope, cache, tables, starts, lengths, scale, max_query):
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


def split_tiling(
    device: torch.device, heads: int, max_query: int, rank: int, rope: int, dtype: torch.dtype
) -> LatentTiling:
    """Tiles of as many rows as a block of queries has, up to 64 where warpgroups multiply, else 32; in fp32 16."""
    chip, rows = accelerator_of(device), power_of_two(heads * max_query)
    warpgroups = chip is not None and chip.vendor == "nvidia" and chip.capability[0] == 9
    if warpgroups and rows > 16 and dtype.itemsize == 2 and (rank, rope) == (512, 64):
        return _in_blocks(LatentTiling(m=64, n=64, warps=8, stages=2, workers=1, warpgroups=True), heads, max_query)
    width = max(16, power_of_two(rank)) + max(16, power_of_two(rope))
    tiles = [tile for tile in _TILES[dtype.itemsize] if tile.m <= max(16, rows)]
    fitting = first_fitting(device, tiles, lambda tile: _shared_bytes(tile, width, dtype.itemsize))
    return _in_blocks(fitting, heads, max_query)


# by bytes per number, best first: the later ones are for fewer rows, or less shared memory
_TILES = {
    2: (
        LatentTiling(m=32, n=64, warps=8, stages=2, workers=1),
        LatentTiling(m=16, n=32, warps=4, stages=3, workers=2),
        LatentTiling(m=16, n=16, warps=4, stages=2, workers=2),
    ),
    4: (
        LatentTiling(m=16, n=16, warps=4, stages=2, workers=1),
        LatentTiling(m=16, n=16, warps=4, stages=1, workers=1),
    ),
}


def _shared_bytes(tile: LatentTiling, width: int, itemsize: int) -> int:
    """Shared memory, no less than it compiles to (tests/kernels/compile_for.py): queries and waiting keys."""
    return ((tile.stages - 1) * tile.n + tile.m) * width * itemsize + (8 << 10)


def _in_blocks(tile: LatentTiling, heads: int, max_query: int) -> LatentTiling:
    """Several queries in a tile where their heads fit, else several tiles for one query."""
    queries = max(1, min(max_query, tile.m // heads))
    return replace(tile, queries=queries, tiles=ceil_div(heads * queries, tile.m))


def _launch(q, q_rope, cache, tables, starts, lengths, out, scale, tiling, blocks):
    (tokens, heads, rank), num_rows = q.shape, tables.shape[0]
    workers, rows = max(1, num_programs(q, tiling.workers) // tiling.tiles), tiling.tiles * tiling.m
    width = max(16, power_of_two(rank))
    partial = torch.empty(2 * workers * rows * width, dtype=torch.float32, device=q.device)
    peaks = torch.empty(2 * workers * 2 * rows, dtype=torch.float32, device=q.device)
    shared = torch.empty(5 * workers, dtype=torch.int32, device=q.device)
    pointers = (q, q_rope, cache, tables, starts, lengths, out, partial, peaks, shared)
    strides = (*q.stride()[:2], *q_rope.stride()[:2], *cache.stride()[:2], tables.stride(0))
    sizes = {"HEADS": heads, "QUERIES": tiling.queries, "TILES": tiling.tiles, "C": rank, "R": q_rope.shape[2]}
    sizes |= {"PAGE": cache.shape[1], "M": tiling.m, "N": tiling.n}
    numbers, searched = (scale, num_rows, tokens), 32 if num_rows <= 32 else max(256, power_of_two(num_rows))
    if tiling.warpgroups:
        _launch_wgmma(pointers, numbers, strides, sizes, workers, searched)
    else:
        early = can_start_early(q.device)
        decode[(workers * tiling.tiles,)](
            *pointers,
            *numbers,
            *strides,
            **sizes,
            ROWS=searched,  # few sizes: each is compiled separately
            C_PAD=width,
            R_PAD=max(16, power_of_two(q_rope.shape[2])),
            PRECISION="tf32x3",  # for fp32: three MMAs that keep its precision
            EARLY=early,
            num_warps=tiling.warps,
            num_stages=tiling.stages,
            **early_launch(early),
        )
    _launch_combine(partial, peaks, shared, out, num_rows * blocks, workers, rows, width)


def _launch_wgmma(pointers, numbers, strides, sizes, workers, searched):
    from armillary.kernels.latent.decode_wgmma import PLANNED, WARPS, decode_wgmma, plan

    starts, lengths, shared = pointers[4], pointers[5], pointers[9]
    planned = torch.empty(PLANNED * workers, dtype=torch.int32, device=starts.device)
    plan[(workers,)](
        starts,
        lengths,
        planned,
        shared,
        numbers[1],
        workers,
        N=sizes["N"],
        QUERIES=sizes["QUERIES"],
        ROWS=searched,
        PLANNED=PLANNED,
    )
    decode_wgmma[(workers * sizes["TILES"],)](
        *pointers, planned, *numbers, *strides, **sizes, PLANNED=PLANNED, num_warps=WARPS
    )


def _launch_combine(partial, peaks, shared, out, most_blocks, workers, rows, width):
    """`most_blocks` queries at most are shared by workers. Parts of few blocks are many: more programs share a row."""
    early, parts = can_start_early(out.device), 4 * ceil_div(workers, 4 * most_blocks)
    columns = width if parts <= 8 else max(16, min(width, 64))
    combine[(min(workers, most_blocks), rows, width // columns)](
        partial,
        peaks,
        shared,
        out,
        workers,
        WORKERS=power_of_two(workers),
        HEADS=out.shape[1],
        C=out.shape[2],
        C_PAD=width,
        M=rows,
        W=columns,
        PARTS=min(128, power_of_two(parts)),
        EARLY=early,
        num_warps=4,
        **early_launch(early),
    )
