"""Tile sizes and constants of the 2-simplicial kernels: the fastest of an H200 (benchmarks/simplicial_h200.md)."""

from collections.abc import Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from armillary.kernels.core.launch import ceil_div, first_fitting, power_of_two
from armillary.kernels.simplicial.simplicial import halves


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


def constants_of(tiles: SimplicialTiles, q: Tensor, k2: Tensor, window_1: int) -> tuple[dict[str, Any], int]:
    """(constants of a kernel, programs per KV head)."""
    group, D = q.shape[-2] // k2.shape[-2], q.shape[-1]
    heads, first_keys = group_and_pairs(tiles, group, window_1)
    constants = {
        "FP32": q.dtype == torch.float32,
        "D": D,
        "BLOCK_D": max(16, power_of_two(D)),
        "GROUP": heads,
        "PAIRS": first_keys,
        "BLOCK_N": tiles.keys,
        "FLAT": tiles.flat,
        "num_warps": tiles.warps,
    }
    return constants, ceil_div(group, heads)


def ordered(
    k: Tensor, v: Tensor, window_1: int, window_2: int
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], tuple[int, int]]:
    """Keys and values with the longer window second: tiles are along that one."""
    keys, values = halves(k), halves(v)
    if window_1 <= window_2:
        return keys, values, (window_1, window_2)
    return keys[::-1], values[::-1], (window_2, window_1)


HOPPER_KERNELS: Set[str] = frozenset(["forward", "query", "second"])
"""kernels of wgmma.py that `on_hopper` takes: each is faster than Triton's (benchmarks/simplicial_h200.md)"""


def for_hopper(kernel: str, q: Tensor, k2: Tensor, v2: Tensor, *, heads: int) -> Any:
    """The module that launches a kernel written for Hopper, where that may run."""
    if kernel not in HOPPER_KERNELS:
        return None
    from armillary.kernels.simplicial import wgmma

    return None if wgmma.why_not(q, k2, heads) or wgmma.why_not(q, v2, heads) else wgmma
