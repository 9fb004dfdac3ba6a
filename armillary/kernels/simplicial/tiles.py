"""Tile sizes of the 2-simplicial kernels. bf16: the fastest of an H200 first (benchmarks/simplicial_h200.md)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from armillary.kernels.core.launch import first_fitting, power_of_two


@dataclass(frozen=True)
class SimplicialTiles:
    """Block sizes and launch options of a kernel."""

    rows: int  # heads of a program, times first keys where heads are fewer
    keys: int  # second keys per block
    warps: int
    stages: int  # loads in flight
    shared_kb: int  # most that it compiles to for 8.x and 12.x; 9.0 has enough for all
    flat: bool = False  # one loop over pairs of blocks, so that loads go on from one first key to the next


# (kernel, whether it is for fp32) -> tiles, best first
_TILES: dict[tuple[str, bool], tuple[SimplicialTiles, ...]] = {
    ("forward", False): (SimplicialTiles(64, 64, 4, 3, 88), SimplicialTiles(64, 32, 4, 2, 0)),
    ("forward", True): (SimplicialTiles(32, 32, 4, 1, 0), SimplicialTiles(16, 16, 4, 1, 0)),
    ("query", False): (SimplicialTiles(64, 64, 8, 3, 104), SimplicialTiles(32, 32, 4, 1, 0)),
    ("query", True): (SimplicialTiles(16, 16, 4, 1, 0),),
    ("second", False): (SimplicialTiles(64, 128, 8, 2, 160), SimplicialTiles(32, 32, 4, 1, 0)),
    ("second", True): (SimplicialTiles(16, 16, 4, 1, 0),),
}


def simplicial_tiles(kernel: str, q: Tensor) -> SimplicialTiles:
    """For the 'forward' kernel, or the backward kernels of queries ('query') or of second keys ('second')."""
    tiles = _TILES[kernel, q.dtype == torch.float32]
    return first_fitting(q.device, tiles, lambda each: each.shared_kb << 10)


def group_and_pairs(tiles: SimplicialTiles, group: int, window_1: int) -> tuple[int, int]:
    """(heads of a program, first keys of a program): together the rows of a tile, but at least 16, for the tensor
    cores, and no more first keys than the window has."""
    heads = min(tiles.rows, power_of_two(group))
    first_keys = min(max(1, tiles.rows // heads), power_of_two(window_1))
    return heads, max(first_keys, 16 // heads)
