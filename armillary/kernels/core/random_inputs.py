"""Random buffers for benchmarks: zeros are faster on real chips, and hide unwritten results.

A pool is one long row of random values; buffers and matrices are slices of it, so that many of them cost one fill.
"""

from collections.abc import Sequence
from math import prod

import torch

_BLOCK = 4_194_301  # prime, so that rows of matrices do not repeat the same values


def random_row(count: int, dtype: torch.dtype, device: torch.device, *, seed: int = 0) -> torch.Tensor:
    """`count` random values: normal for floats, the full range for int8."""
    size, generator = (min(count, _BLOCK),), torch.Generator(device).manual_seed(seed)
    if dtype == torch.int8:
        block = torch.randint(-128, 128, size, dtype=dtype, device=device, generator=generator)
    else:
        block = torch.randn(size, device=device, generator=generator).to(dtype)
    if count <= _BLOCK:
        return block
    row = torch.empty(count, dtype=dtype, device=device)
    for start in range(0, count, _BLOCK):  # repeating a block fills memory at its own speed
        row[start : start + _BLOCK] = block[: count - start]
    return row


_ALIGN = 64  # elements; every buffer starts at a multiple, so that the fastest loads can be used


class Pool:
    """A row that is handed out in sets of buffers, starting over when it is used up; buffers of one set never
    overlap."""

    def __init__(self, row: torch.Tensor) -> None:
        self._row = row

    def sets(self, count: int, shapes: Sequence[tuple[int, ...]]) -> list[list[torch.Tensor]]:
        """`count` sets of one buffer per shape."""
        size = set_elements(shapes)
        num_fitting = self._row.numel() // size
        assert num_fitting, "the pool is smaller than one set"
        return [self._set(number % num_fitting * size, shapes) for number in range(count)]

    def _set(self, start: int, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
        buffers = []
        for shape in shapes:
            buffers.append(self._row[start : start + prod(shape)].view(*shape))
            start += _aligned(prod(shape))
        return buffers


def set_elements(shapes: Sequence[tuple[int, ...]]) -> int:
    """Elements of the row that one set takes."""
    return sum(_aligned(prod(shape)) for shape in shapes)


def _aligned(count: int) -> int:
    return -(-count // _ALIGN) * _ALIGN
