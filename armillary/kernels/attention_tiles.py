"""How our attention kernels cut their work, and whether their tiles can come by the copy engine.

Measured on an H200 at 8k tokens and head dim 128; the comparisons are in benchmarks/.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from armillary.kernels.launch import power_of_two
from armillary.machine.accelerator import accelerator_of


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """How a kernel cuts its work."""

    queries: int
    """of a block"""
    keys: int
    """of a block"""
    warps: int
    """of a program"""
    stages: int
    """loads in flight"""


def forward_tiles(head_dim: int, dtype: torch.dtype, packed: bool) -> Tiles:
    """Of head dim 128, three stages just let two programs share a multiprocessor; with document numbers only two do."""
    if dtype == torch.float32:
        return Tiles(queries=64, keys=32, warps=4, stages=2 if head_dim <= 128 else 1)
    if head_dim <= 64:
        return Tiles(queries=128, keys=128, warps=8, stages=3)
    if head_dim <= 128:
        return Tiles(queries=64, keys=64, warps=4, stages=2 if packed else 3)
    return Tiles(queries=128, keys=64, warps=8, stages=2)


def key_tiles(head_dim: int, dtype: torch.dtype) -> Tiles:
    if dtype == torch.float32:
        return Tiles(queries=16, keys=32, warps=4, stages=1)
    if head_dim <= 64:
        return Tiles(queries=64, keys=128, warps=8, stages=2)
    return Tiles(queries=64, keys=64, warps=4 if head_dim <= 128 else 8, stages=2)


def query_tiles(head_dim: int, dtype: torch.dtype) -> Tiles:
    if dtype == torch.float32:
        return Tiles(queries=32, keys=16, warps=4, stages=1)
    if head_dim <= 128:
        return Tiles(queries=128, keys=64, warps=8, stages=3)
    return Tiles(queries=128, keys=32, warps=8, stages=2)


def can_copy(*tensors: Tensor) -> bool:
    """Whether tiles can come by TMA: a Hopper chip or newer, whole heads, everything aligned to 16 bytes."""
    return all(
        ((chip := accelerator_of(x.device)) is None or chip.tma)
        and x.shape[-1] >= 16
        and x.shape[-1] == power_of_two(x.shape[-1])
        and x.data_ptr() % 16 == 0
        and all(stride * x.element_size() % 16 == 0 for stride in x.stride()[:-1])
        for x in tensors
    )


def described(x_BTND: Tensor, length: int) -> TensorDescriptor:
    """Tiles of `length` tokens of one head."""
    return TensorDescriptor.from_tensor(x_BTND, [1, length, 1, x_BTND.shape[-1]])
