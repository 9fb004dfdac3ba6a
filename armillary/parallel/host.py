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
    """Where tensors wait that left the device; counts what it gave out and is still in use."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._given: dict[int, int] = {}
        self.bytes = self.peak = 0

    def like(self, tensor: Tensor) -> Tensor:
        """A buffer that lies as this tensor does; torch keeps pinned ones for the next to ask."""
        with _disable_current_modes():  # who watches the device's memory must not take it for the device's
            return self._noted(torch.empty_like(tensor, device="cpu", pin_memory=self._on_gpu, requires_grad=False))

    def lasting(self, count: int, dtype: torch.dtype) -> Tensor:
        """`count` zeros that stay for the run: pinned at their own size, where torch would round it up to a power of
        two."""
        with _disable_current_modes():
            made = torch.zeros(count, dtype=dtype, device="cpu")
        if self._on_gpu and made.nbytes:
            api, address = torch.cuda.cudart(), made.data_ptr()
            if int(api.cudaHostRegister(address, made.nbytes, 0)):
                raise ArmillaryError(f"no {made.nbytes / 1e9:.1f} GB more can be pinned; try --set layout.offload=nvme")
            weakref.finalize(made.untyped_storage(), api.cudaHostUnregister, address)
        return self._noted(made)

    def adopt(self, tensor: Tensor) -> Tensor:
        """One that is no part of the device either, and counted by somebody else."""
        self._given[tensor.untyped_storage().data_ptr()] = 0
        return tensor

    def holds(self, tensor: Tensor) -> bool:
        """Whether it lies here and not on the device."""
        return tensor.untyped_storage().data_ptr() in self._given

    def _noted(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        if size:
            self._given[address] = size
            self.bytes += size
            self.peak = max(self.peak, self.bytes)
            weakref.finalize(storage, self._back, address)
        return tensor

    def _back(self, address: int) -> None:
        self.bytes -= self._given.pop(address, 0)


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
                raise ArmillaryError(f"no room for {size / 1e9:.1f} GB of optimiser states in {folder} "
                                     f"({error.strerror}); free some, or --set layout.offload=optimizer") from error
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
