"""Which tiles a GPU's shared memory holds: kernels list theirs, the best first, with the bytes that each needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from armillary.machine.accelerator import accelerator_of

T = TypeVar("T")


def first_fitting(device: torch.device, tiles: Sequence[T], shared_bytes: Callable[[T], int]) -> T:
    """The first whose shared memory a block may have there; the last and smallest where none fits. On a CPU, where the
    interpreter runs kernels, the first."""
    chip = accelerator_of(device)
    if chip is None:
        return tiles[0]
    return next((tile for tile in tiles if shared_bytes(tile) <= chip.shared_bytes), tiles[-1])
