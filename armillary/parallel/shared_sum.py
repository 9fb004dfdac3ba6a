"""A one-shot all-reduce of ranks on the CPUs of one host, through memory that all of them map.

Every rank writes its part and adds up all parts (`kernels/native/shared_sum.cpp`): one exchange of cache lines instead
of messages between threads of a process group. It is for the sums of tensor parallelism, of which a decode step has two
per layer; its slow twin is `collectives.all_reduce`.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from armillary.errors import ArmillaryError
from armillary.kernels.native.library import library
from armillary.parallel.collectives import Group, all_gather, all_reduce
from armillary.parallel.device_sum import device_sum

_PART_BYTES = 1 << 18
"""of one call; longer tensors take several"""
_LINE = 64
_PATIENCE_S = 0.2
_NAME = "armillary-sum"


class RankLost(ArmillaryError):
    """A rank has ended in the middle of a sum."""


def sum_over(group: Group, device: torch.device) -> Callable[[Tensor], Tensor]:
    """The all-reduce of a group; all of its ranks call this together. Through shared memory where all of them are on
    the CPUs of one host and have C++ kernels, through each other's memory where they are on GPUs that reach it, else
    the process group's."""

    def by_group(x: Tensor) -> Tensor:
        return all_reduce(x, group)

    if device.type == "cuda" and group.size > 1:
        return device_sum(group, device, by_group) or by_group
    if device.type != "cpu" or sys.platform != "linux" or group.size == 1:
        return by_group
    shared = _opened(group)
    return by_group if shared is None else SharedSum(shared, group, by_group)


class SharedSum:
    """Called by all ranks with tensors of one shape, in the same order."""

    def __init__(
        self, memory: tuple[mmap.mmap, list[int]], group: Group, otherwise: Callable[[Tensor], Tensor]
    ) -> None:
        """`memory` with the processes that map it, by rank; `otherwise` sums dtypes that the kernel does not."""
        self._map, self._pids = memory
        self._memory = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._group, self._otherwise, self._number = group, otherwise, 0
        kernels = library()
        assert kernels is not None
        self._kernel = kernels.armillary_shared_sum

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype not in (torch.float32, torch.bfloat16):
            return self._otherwise(x)
        x = x.contiguous()
        y, width, size = torch.empty_like(x), x.element_size(), x.numel()
        most = _PART_BYTES // width
        for begin in range(0, size, most):
            self._sum(x.data_ptr() + begin * width, y.data_ptr() + begin * width, min(most, size - begin), width)
        return y

    def _sum(self, x: int, y: int, size: int, width: int) -> None:
        self._number += 1
        resumed, place = 0, (self._memory, _PART_BYTES, self._group.rank, self._group.size, self._number)
        while (missing := self._kernel(*place, x, y, size, width, resumed, _PATIENCE_S)) >= 0:
            resumed = 1
            if not _alive(self._pids[missing]):
                raise RankLost(f"rank {missing} of {self._group.size} has ended; restart the others")


def _opened(group: Group) -> tuple[mmap.mmap, list[int]] | None:
    """The first rank's memory; None where some rank cannot map it."""
    size = group.size * (_LINE + 2 * _PART_BYTES)
    fd = os.memfd_create(_NAME, os.MFD_CLOEXEC) if not group.rank else -1
    if fd >= 0:
        os.ftruncate(fd, size)
    inode = os.fstat(fd).st_ino if fd >= 0 else 0
    network = Path("/proc/self/ns/net").stat().st_ino  # ranks of several hosts that are namespaces are several hosts
    offers = all_gather(torch.tensor([[os.getpid(), fd, inode, network]]), group, dim=0).tolist()
    pids = [pid for pid, *_ in offers]
    same = library() is not None and all(_alive(pid) for pid in pids) and {offer[3] for offer in offers} == {network}
    if group.rank and same:
        fd = _open(*offers[0][:3])
    memory = mmap.mmap(fd, size) if fd >= 0 and same else None
    votes = torch.tensor([memory is not None], dtype=torch.int32)
    agreed = bool(all_reduce(votes, group, "min").item())  # from here on the first rank may close its descriptor
    if fd >= 0:
        os.close(fd)
    return (memory, pids) if agreed and memory is not None else None


def _open(pid: int, number: int, inode: int) -> int:
    """A descriptor of the first rank's memory; -1 where this process does not see it."""
    path = Path(f"/proc/{pid}/fd/{number}")
    try:
        if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
            return -1
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return -1
    if os.fstat(fd).st_ino == inode:
        return fd
    os.close(fd)
    return -1


def _alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"
