"""Memory beside the device's, and the lane on which copies travel there and back while the device computes.

Buffers are pinned where there is a GPU. On a CPU, whose memory is the host's already, they are a pool of their own,
told apart from what the "device" holds, so that what offloading frees can be seen there too.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from armillary.errors import ArmillaryError

Event = Any
"""torch.cuda.Event, or None on a CPU, where a copy is done when it returns"""


class HostMemory:
    """Where tensors wait that left the device; counts what is in use."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._free: dict[int, list[Tensor]] = {}
        self._known: set[int] = set()
        self.bytes = self.peak = 0

    def like(self, tensor: Tensor) -> Tensor:
        """A buffer that lies as this tensor does. One that nobody holds any more is given out again: copies to it and
        from it must be launched on one lane, where they wait for each other."""
        size, strides = tensor.numel() * tensor.element_size(), torch.empty_like(tensor, device="meta").stride()
        with _disable_current_modes():  # who watches the device's memory must not take it for the device's
            free = self._free.setdefault(size, [])
            buffer = free.pop() if free else self._made(size)
            given = buffer.view(tensor.dtype).as_strided(tensor.shape, strides)
        self._count(size)
        weakref.finalize(given, self._take_back, buffer)
        return given

    def lasting(self, count: int, dtype: torch.dtype) -> Tensor:
        """`count` zeros that stay for the run."""
        with _disable_current_modes():
            made = self._made(count * dtype.itemsize).zero_().view(dtype)
        self._count(made.nbytes)
        return made

    def adopt(self, tensor: Tensor) -> Tensor:
        """One that is no part of the device either, and counted by somebody else."""
        self._known.add(tensor.untyped_storage().data_ptr())
        return tensor

    def holds(self, tensor: Tensor) -> bool:
        """Whether it lies here and not on the device."""
        return tensor.untyped_storage().data_ptr() in self._known

    def _made(self, size: int) -> Tensor:
        """Pinned at its own size, where torch would round it up to a power of two."""
        made = torch.empty(size, dtype=torch.uint8, device="cpu")
        if size:
            self._known.add(made.data_ptr())
        if self._on_gpu and size:
            made.fill_(0)  # by all cores: pages that are there already are pinned quickly
            api, address = torch.cuda.cudart(), made.data_ptr()
            if int(api.cudaHostRegister(address, size, 0)):
                raise ArmillaryError(f"no {size / 1e9:.1f} GB more can be pinned; try --set layout.offload=nvme")
            weakref.finalize(made.untyped_storage(), api.cudaHostUnregister, address)
        return made

    def _count(self, size: int) -> None:
        self.bytes += size
        self.peak = max(self.peak, self.bytes)

    def _take_back(self, buffer: Tensor) -> None:
        self.bytes -= buffer.nbytes
        self._free[buffer.nbytes].append(buffer)


class MappedFile:
    """Zeros in a file that is mapped into memory and has no name, so that nothing is left of it when the run ends.

    The system reads what is touched and writes it back when it likes; `soon` and `done` tell it what comes and what
    has been.
    """

    def __init__(self, folder: Path, size: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            try:
                os.posix_fallocate(file.fileno(), 0, max(size, 1))  # a full disk is an error now, not a signal later
            except OSError as error:
                raise ArmillaryError(
                    f"no room for {size / 1e9:.1f} GB of optimiser states in {folder} "
                    f"({error.strerror}); free some, or --set layout.offload=optimizer"
                ) from error
            self._map = mmap.mmap(file.fileno(), max(size, 1))
        self.bytes = size

    def tensor(self, begin: int, count: int, dtype: torch.dtype) -> Tensor:
        """`count` numbers from byte `begin` on."""
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=begin)

    def soon(self, begin: int, end: int) -> None:
        """These bytes are wanted next: read them ahead."""
        self._advise(mmap.MADV_WILLNEED, begin, end)

    def done(self, begin: int, end: int) -> None:
        """These bytes are not wanted for a while: this process lets go of them."""
        self._advise(mmap.MADV_DONTNEED, begin, end)

    def _advise(self, how: int, begin: int, end: int) -> None:
        page = mmap.PAGESIZE
        first, last = (begin, end) if how == mmap.MADV_WILLNEED else (begin + page - 1, end)  # no page of a neighbour's
        first, last = first // page * page, min(last, self.bytes)
        if last > first:
            self._map.madvise(how, first, last - first)


class Lane:
    """A stream for copies beside the one that computes; on a CPU everything happens at once and nothing waits."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def on(self, after: Event = None) -> Iterator[None]:
        """What is launched inside goes here, once `after` has happened."""
        if self._stream is None:
            yield
            return
        if after is not None:
            self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> Event:
        """All that was launched here so far."""
        return None if self._stream is None else self._stream.record_event()


def computed(device: torch.device) -> Event:
    """All that was launched to be computed so far."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def compute_after(event: Event, device: torch.device) -> None:
    """What is computed from here on waits for the event."""
    if event is not None:
        torch.cuda.current_stream(device).wait_event(event)


def wait_for(event: Event) -> None:
    """The host waits."""
    if event is not None:
        event.synchronize()
