"""Tile sizes of the grouped GEMMs of a mixture of experts, by rows per expert and device."""

from typing import NamedTuple

import torch
from torch import Tensor

from armillary.kernels.core.launch import first_fitting
from armillary.machine.accelerator import accelerator_of
from armillary.spec.model import MoE


class GroupedMoETile(NamedTuple):
    """Tile sizes and launch options of both GEMMs."""

    rows: int
    columns: int
    step: int  # summed elements per step of the loop
    warps: int
    stages: int  # steps whose operands are in shared memory
    swapped: bool = False  # the weight is the first operand
    group: int = 1  # tiles whose columns are next to each other in time

    def shared_bytes(self, itemsize: int) -> int:
        return self.stages * (self.rows + self.columns) * self.step * itemsize


class GroupedMoETiles(NamedTuple):
    """Of both GEMMs, with as many rows each."""

    up: GroupedMoETile
    down: GroupedMoETile

    def shared_bytes(self, itemsize: int) -> int:
        return max(tile.shared_bytes(itemsize) for tile in self)


def _both(tile: GroupedMoETile) -> GroupedMoETiles:
    return GroupedMoETiles(tile, tile)


_INTERPRETED = _both(GroupedMoETile(16, 32, 32, warps=4, stages=1, swapped=True, group=2))
_FP32 = (_both(GroupedMoETile(32, 64, 32, 4, 3)),)
# largest number of rows per expert -> tiles, best first, as timed on an H200
_TILES = {
    6: (
        GroupedMoETiles(GroupedMoETile(16, 128, 128, 4, 5, True), GroupedMoETile(16, 128, 128, 4, 3, True)),
        _both(GroupedMoETile(16, 128, 64, 4, 3)),
    ),
    20: (
        GroupedMoETiles(GroupedMoETile(32, 128, 128, 4, 5, True), GroupedMoETile(32, 128, 64, 4, 5, True)),
        _both(GroupedMoETile(32, 128, 64, 4, 3)),
    ),
    44: (
        GroupedMoETiles(GroupedMoETile(64, 256, 64, 8, 3), GroupedMoETile(64, 128, 64, 4, 3)),
        _both(GroupedMoETile(64, 128, 64, 4, 3)),
    ),
    1 << 60: (
        _both(GroupedMoETile(128, 256, 64, 8, 4, False, 8)),
        _both(GroupedMoETile(128, 128, 32, 8, 3, False, 8)),
    ),
}


# of packed weights, whose codes become numbers in registers: no larger than these hold; not measured
_PACKED_TILES = {
    6: (_both(GroupedMoETile(16, 128, 128, 4, 3, True)), _both(GroupedMoETile(16, 64, 64, 4, 3, True))),
    20: (_both(GroupedMoETile(32, 128, 64, 4, 3, True)), _both(GroupedMoETile(32, 64, 64, 4, 3, True))),
    44: (_both(GroupedMoETile(64, 128, 64, 8, 3)), _both(GroupedMoETile(64, 64, 64, 4, 3))),
    1 << 60: (_both(GroupedMoETile(128, 128, 64, 8, 3, False, 8)), _both(GroupedMoETile(64, 128, 32, 8, 3, False, 8))),
}


def tiles_for(x_MH: Tensor, moe: MoE, *, packed: bool = False) -> GroupedMoETiles:
    if accelerator_of(x_MH.device) is None:
        return _INTERPRETED
    rows = len(x_MH) * moe.top_k / moe.num_experts
    by_rows = _PACKED_TILES if packed else _TILES
    tiles = _FP32 if x_MH.dtype == torch.float32 else next(tiles for most, tiles in by_rows.items() if rows <= most)
    return first_fitting(x_MH.device, tiles, lambda tile: tile.shared_bytes(x_MH.element_size()))
