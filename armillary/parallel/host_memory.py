"""Host memory for offloading, and the stream on which copies run while the device computes.

Buffers are pinned where there is a GPU. On a CPU, whose memory is the host's already, they are a separate pool, so that
the memory that offloading frees can be measured there too.
"""

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
    """Buffers for tensors that left the device; counts the bytes in use."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._free: dict[int, list[Tensor]] = {}
        self._known: set[int] = set()
        self.bytes = self.peak = 0

    def buffer_for(self, tensor: Tensor) -> Tensor:
        """A buffer with the shape and strides of this tensor. A buffer that is not referenced any more is reused, so
        copies to it and from it must be launched on one stream, where they wait for each other."""
        size, strides = tensor.numel() * tensor.element_size(), torch.empty_like(tensor, device="meta").stride()
        with _disable_current_modes():  # a memory tracker must not count it as the device's
            free = self._free.setdefault(size, [])
            buffer = free.pop() if free else self._allocate(size)
            given = buffer.view(tensor.dtype).as_strided(tensor.shape, strides)
        self._count(size)
        weakref.finalize(given, self._take_back, buffer)
        return given

    def lasting(self, count: int, dtype: torch.dtype) -> Tensor:
        """`count` zeros that stay for the run."""
        with _disable_current_modes():
            zeros = self._allocate(count * dtype.itemsize).zero_().view(dtype)
        self._count(zeros.nbytes)
        return zeros

    def adopt(self, tensor: Tensor) -> Tensor:
        """A tensor that is not the device's either, and is counted elsewhere."""
        self._known.add(tensor.untyped_storage().data_ptr())
        return tensor

    def holds(self, tensor: Tensor) -> bool:
        """Whether its memory is the host's and not the device's."""
        return tensor.untyped_storage().data_ptr() in self._known

    def _allocate(self, size: int) -> Tensor:
        """Pinned at its own size, where torch would round it up to a power of two."""
        buffer = torch.empty(size, dtype=torch.uint8, device="cpu")
        if size:
            self._known.add(buffer.data_ptr())
        if self._on_gpu and size:
            buffer.fill_(0)  # by all cores: pages that exist already are pinned quickly
            api, address = torch.cuda.cudart(), buffer.data_ptr()
            if int(api.cudaHostRegister(address, size, 0)):
                raise ArmillaryError(f"no {size / 1e9:.1f} GB more can be pinned; try --set layout.offload=nvme")
            weakref.finalize(buffer.untyped_storage(), api.cudaHostUnregister, address)
        return buffer

    def _count(self, size: int) -> None:
        self.bytes += size
        self.peak = max(self.peak, self.bytes)

    def _take_back(self, buffer: Tensor) -> None:
        self.bytes -= buffer.nbytes
        self._free[buffer.nbytes].append(buffer)


class MappedFile:
    """Zeros in an unnamed file that is mapped into memory, so that nothing is left of it when the run ends.

    The system reads pages on access and writes them back when it likes; `prefetch` and `release` advise it.
    """

    def __init__(self, folder: Path, size: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            try:
                os.posix_fallocate(file.fileno(), 0, max(size, 1))  # a full disk is an error now, not a signal later
            except OSError as error:
                raise ArmillaryError(
                    f"no room for {size / 1e9:.1f} GB of optimizer states in {folder} "
                    f"({error.strerror}); free some, or --set layout.offload=optimizer"
                ) from error
            self._map = mmap.mmap(file.fileno(), max(size, 1))
        self.bytes = size

    def tensor(self, begin: int, count: int, dtype: torch.dtype) -> Tensor:
        """`count` numbers from byte `begin` on."""
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=begin)

    def prefetch(self, begin: int, end: int) -> None:
        """These bytes are needed next: read them ahead."""
        self._advise(mmap.MADV_WILLNEED, begin, end)

    def release(self, begin: int, end: int) -> None:
        """These bytes are not needed for a while: this process drops them."""
        self._advise(mmap.MADV_DONTNEED, begin, end)

    def _advise(self, how: int, begin: int, end: int) -> None:
        page = mmap.PAGESIZE
        first, last = (begin, end) if how == mmap.MADV_WILLNEED else (begin + page - 1, end)  # no page of a neighbour's
        first, last = first // page * page, min(last, self.bytes)
        if last > first:
            self._map.madvise(how, first, last - first)


class CopyStream:
    """A stream for copies beside the compute stream; on a CPU a copy is done when it returns."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def on(self, after: Event = None) -> Iterator[None]:
        """Work launched inside runs on this stream, after the event `after`."""
        if self._stream is None:
            yield
            return
        if after is not None:
            self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> Event:
        """An event after all work launched here so far."""
        return None if self._stream is None else self._stream.record_event()


def computed(device: torch.device) -> Event:
    """An event after all work launched on the compute stream so far."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def compute_after(event: Event, device: torch.device) -> None:
    """The compute stream waits for the event."""
    if event is not None:
        torch.cuda.current_stream(device).wait_event(event)


def wait_for(event: Event) -> None:
    """The host waits for the event."""
    if event is not None:
        event.synchronize()
