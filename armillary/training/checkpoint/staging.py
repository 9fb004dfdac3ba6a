"""Staging: a host buffer that has the layout of the file it becomes, into which a save copies this rank's tensors.

The copy runs beside the next forward and backward pass: on a side stream with a GPU, else in a thread. Only the next
optimizer step, which changes the tensors, waits for it. The buffer is an unnamed file in memory, which the process that
writes it to disk maps as well.
"""

import ctypes
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from armillary.parallel.host_memory import CopyStream, Event, computed, wait_for
from armillary.training.checkpoint.container import container
from armillary.training.checkpoint.save_plan import Place

SMALL = 64 << 10
"""bytes up to which a tensor of the host is copied at once: counters and buffers may change before the next update"""
_PINNED_AT_ONCE = 1 << 30
_PORTABLE = 1  # pinned for all devices, whichever thread asks
_MEMORY_LEFT = 0.25
"""share of the available memory that the buffers of a machine leave free; larger ones are files on disk"""


class StagingBuffer:
    """`size` bytes that another process can map by the file descriptor `fd`: in memory, or an unnamed file in `folder`.
    Pinned for a GPU."""

    def __init__(
        self, places: tuple[Place, ...], size: int, folder: Path, *, pin: bool, in_memory: bool = True
    ) -> None:
        self.size = size
        self.fd = _open(max(size, 1), folder, in_memory=in_memory)
        self._map = mmap.mmap(self.fd, max(size, 1))
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._pinned: list[int] = []
        for place in places:
            wrapper, end = container(place.chunk.sizes, place.chunk.dtype), place.offset + place.length
            self._map[place.offset : place.data] = wrapper.head
            self._map[end - len(wrapper.tail) : end] = wrapper.tail
        if pin:
            self._pin()

    def tensor(self, place: Place) -> Tensor:
        """The bytes of a chunk as the tensor they are."""
        chunk = place.chunk
        return self.bytes[place.data : place.data + chunk.bytes].view(chunk.dtype).view(chunk.sizes)

    def piece_ends(self, place: Place) -> list[int]:
        """Where pieces that were pinned by themselves end inside a chunk, in bytes of it: CUDA refuses one copy into
        two of them."""
        first = place.data // _PINNED_AT_ONCE + 1
        last = (place.data + place.chunk.bytes - 1) // _PINNED_AT_ONCE
        return [piece * _PINNED_AT_ONCE - place.data for piece in range(first, last + 1)]

    def _pin(self) -> None:
        """Page-locked, a piece at a time, so that other calls of the driver get their turn. Where it cannot be, copies
        are slower."""
        self.bytes[:: mmap.PAGESIZE] |= 0  # pages that exist already are pinned quickly
        api, begin = torch.cuda.cudart(), self.bytes.data_ptr()
        for at in range(0, self.size, _PINNED_AT_ONCE):
            if int(api.cudaHostRegister(begin + at, min(_PINNED_AT_ONCE, self.size - at), _PORTABLE)):
                return
            self._pinned.append(begin + at)

    def close(self) -> None:
        for address in self._pinned:
            torch.cuda.cudart().cudaHostUnregister(address)
        self._pinned = []
        os.close(self.fd)


def fits_memory(sizes: Sequence[int], machines: Sequence[str], rank: int, available: float | None) -> bool:
    """Whether the memory of a rank's machine, of which this much is available before any of them is made, has enough
    for what all its ranks need: pages are taken only when they are written to."""
    needed = sum(size for size, machine in zip(sizes, machines, strict=True) if machine == machines[rank])
    return available is None or needed < available * (1 - _MEMORY_LEFT)


def _open(size: int, folder: Path, *, in_memory: bool) -> int:
    if hasattr(os, "memfd_create") and in_memory:
        fd = os.memfd_create("armillary checkpoint", 0)
    else:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, size)  # a full disk is an error now, not a signal later
            fd = os.dup(file.fileno())
    try:
        os.ftruncate(fd, size)
    except OSError:
        os.close(fd)
        raise
    return fd


class Copy:
    """One copy of all tensors into a buffer: `start()` returns at once, and `wait()` waits for its end. `run()` is the
    part that a thread of the caller runs."""

    def __init__(self, buffer: StagingBuffer, places: tuple[Place, ...], device: torch.device) -> None:
        self._buffer, self._places, self._device = buffer, places, device
        self._later: list[tuple[Tensor, Tensor]] = []
        self._event: Event = None
        self._host_done = threading.Event()
        self._waits: tuple[Event, Event] | None = None

    @torch.no_grad()
    def start(self, tensors: Mapping[str, Tensor], stream: CopyStream, ready: Event = None) -> None:
        """Launch the copies from the device, copy what is small, and leave large tensors of the host to `run`. By the
        event `ready` the device has computed the tensors; without one, when it is through with all it has to do."""
        ready = computed(self._device) if ready is None else ready
        for place in self._places:
            source, target = part(tensors[place.chunk.name], place), self._buffer.tensor(place)
            if source.device.type == "cuda":
                with stream.on(ready):
                    copy_in_pieces(target, source, self._buffer.piece_ends(place))
            elif source.nbytes <= SMALL or not source.is_contiguous() or source.dtype != target.dtype:
                target.copy_(source)
            else:
                self._later.append((target, source))
        self._event = stream.mark()

    def run(self) -> None:
        """Copy the rest; all is copied when this returns."""
        try:
            for target, source in self._later:
                ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)  # lets other threads run
        finally:
            self._later = []
            self._host_done.set()
        wait_for(self._event)

    def wait(self) -> float:
        """Before the tensors change: the host waits for what it copies itself, the device for its own copies. Returns
        the seconds that the host waited."""
        begin = time.perf_counter()
        self._host_done.wait()
        if self._event is not None and self._waits is None:
            stream = torch.cuda.current_stream(self._device)
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record(stream)
            stream.wait_event(self._event)
            after.record(stream)
            self._waits = before, after
        return time.perf_counter() - begin

    def device_wait_s(self) -> float:
        """How long the device waited, where it is known by now."""
        if self._waits is None or not self._waits[1].query():
            return 0.0
        return self._waits[0].elapsed_time(self._waits[1]) / 1e3


def copy_in_pieces(target: Tensor, source: Tensor, ends: Sequence[int]) -> None:
    """Launch the copy of a tensor of the device to the host, one up to each of these bytes and one to the end."""
    if not ends:
        target.copy_(source, non_blocking=True)
        return
    to, from_ = (tensor.reshape(-1).view(torch.uint8) for tensor in (target, source.to(target.dtype).contiguous()))
    for begin, end in pairwise((0, *ends, to.numel())):
        to[begin:end].copy_(from_[begin:end], non_blocking=True)


def part(tensor: Tensor, place: Place) -> Tensor:
    """The rows of a tensor that a chunk is made of."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    local, chunk = local.detach(), place.chunk
    if not chunk.sizes or local.shape == chunk.sizes:
        return local
    begin = chunk.offsets[0] - _first_row(tensor)
    return local[begin : begin + chunk.sizes[0]]


def _first_row(tensor: Tensor) -> int:
    """Where this rank's shard begins in dim 0 of the tensor."""
    if not isinstance(tensor, DTensor):
        return 0
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return int(offsets[0])


def call_before_steps(optimizer: torch.optim.Optimizer, work: Callable[[], Any]) -> None:
    """Call `work()` before each optimizer step from now on."""
    optimizer.register_step_pre_hook(lambda *_: work())
