"""Tensors from files to a GPU: several threads read pieces into page-locked memory while other pieces are being copied.

A plain copy of a mapped file reads its pages one by one in one thread; from page-locked memory the GPU copies by
itself.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from threading import local
from typing import Any

import torch
from torch import Tensor

from armillary.errors import BadModel
from armillary.model.weights.safetensors_folder import StoredTensor

_THREADS, _PIECE_BYTES, _BUFFERS = 8, 16 << 20, 2
_AHEAD_BYTES = 2 << 30  # of tensors in flight: they are on the device twice until they are joined


class Sender:
    """Sends tensors of files to `device`, in the given order."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool = ThreadPoolExecutor(_THREADS)
        self._own = local()
        self._files: dict[str, int] = {}

    def __enter__(self) -> Sender:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        for file in self._files.values():
            os.close(file)

    def send(self, groups: Iterable[list[StoredTensor]]) -> Iterator[list[Tensor]]:
        """Each list of tensors on the device, ready for use, while the next ones are in flight."""
        queued: deque[tuple[list[Future[Tensor]], int]] = deque()
        in_flight = 0
        for group in groups:
            size = sum(part.nbytes for part in group)
            while queued and in_flight + size > _AHEAD_BYTES:
                futures, done = queued.popleft()
                yield [future.result() for future in futures]
                in_flight -= done
            queued.append(([self._start(part) for part in group], size))
            in_flight += size
        for futures, _ in queued:
            yield [future.result() for future in futures]

    def _start(self, source: StoredTensor) -> Future[Tensor]:
        if source.path not in self._files:
            self._files[source.path] = os.open(source.path, os.O_RDONLY)
        target, free = torch.empty(source.shape, dtype=source.dtype, device=self.device), None
        if self.device.type == "cuda":  # its memory may still be in use by earlier work of the device
            free = torch.cuda.Event()
            free.record(torch.cuda.current_stream(self.device))
        return self._pool.submit(self._copy, source, target, free)

    def _copy(self, source: StoredTensor, target: Tensor, free: Any) -> Tensor:
        """In a thread of the pool: piece by piece through its own buffers."""
        put = target.view(-1).view(torch.uint8) if target.numel() else target
        buffers, events, stream = self._buffers()
        with torch.cuda.stream(stream) if stream is not None else nullcontext():
            if stream is not None:
                stream.wait_event(free)
            for number, begin in enumerate(range(0, source.nbytes, _PIECE_BYTES)):
                size, at = min(_PIECE_BYTES, source.nbytes - begin), number % _BUFFERS
                if stream is not None:
                    events[at].synchronize()
                self._read(source, begin, buffers[at][:size])
                put[begin : begin + size].copy_(buffers[at][:size], non_blocking=True)
                if stream is not None:
                    events[at].record(stream)
            if stream is not None:
                stream.synchronize()
        return target

    def _read(self, source: StoredTensor, begin: int, into: Tensor) -> None:
        view, done = memoryview(into.numpy()), 0
        while done < len(view):
            count = os.preadv(self._files[source.path], [view[done:]], source.offset + begin + done)
            if not count:
                raise BadModel(f"{source.path} ends too early; fetch it again")
            done += count

    def _buffers(self) -> tuple[list[Tensor], list[Any], Any]:
        """This thread's buffers, events and stream."""
        if not hasattr(self._own, "buffers"):
            cuda = self.device.type == "cuda"
            buffers = [torch.empty(_PIECE_BYTES, dtype=torch.uint8, pin_memory=cuda) for _ in range(_BUFFERS)]
            events = [torch.cuda.Event() for _ in range(_BUFFERS)] if cuda else []
            self._own.buffers = (buffers, events, torch.cuda.Stream(self.device) if cuda else None)
        return self._own.buffers  # type: ignore[no-any-return]
