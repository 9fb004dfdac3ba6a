"""Loader: the batches of a run, step by step, ready on the device before they are asked for.

A thread takes them from the worker processes (or makes them itself where there are none), stages them in one of two
pinned buffers and copies them on a stream of its own, so that a step waits only for what is late: `wait_s`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from queue import Full, Queue
from threading import Event, Thread
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.profiler import record_function

from armillary.training.data.batch import IGNORED, LAYOUT, Batch, BatchSource
from armillary.training.data.workers import Workers

AHEAD = 2
"""batches that are ready on the device while one is being used"""
WAIT = "armillary loader: wait for a batch"
"""what a profiler sees of a step that waits"""
_POLL_S = 0.1
_GRACE_S = 15.0


@dataclass(frozen=True, kw_only=True, eq=False)
class DeviceBatch:
    """One rank's rows of a step as tensors (as in `Batch`), and for each row how many positions count in the loss and
    how many documents it is made of: the host need not wait for the device to know."""

    tokens_BT: Tensor
    targets_BT: Tensor
    positions_BT: Tensor
    documents_BT: Tensor
    row_targets: tuple[int, ...]
    row_documents: tuple[int, ...]
    checksum: int = 0  # of all its rows, see Batch

    @property
    def num_targets(self) -> int:
        """Positions of these rows that count in the loss."""
        return sum(self.row_targets)

    @property
    def has_documents(self) -> bool:
        """Whether a row holds more than one document, so that attention needs a mask."""
        return any(count > 1 for count in self.row_documents)

    def micro(self, rows: int) -> list[DeviceBatch]:
        """Micro-batches of `rows` rows; the last may have fewer."""
        return [self._rows(start, start + rows) for start in range(0, len(self.row_targets), rows)]

    def tokens(self, cut: Callable[[Tensor], Tensor]) -> DeviceBatch:
        """Some tokens of every row; counts per row stay those of full rows."""
        cuts: dict[str, Any] = {name: cut(getattr(self, name)) for name in LAYOUT}
        return replace(self, **cuts)

    def _rows(self, start: int, stop: int) -> DeviceBatch:
        parts: dict[str, Any] = {name: getattr(self, name)[start:stop] for name in LAYOUT}
        return replace(
            self, **parts, row_targets=self.row_targets[start:stop], row_documents=self.row_documents[start:stop]
        )


def to_device(batch: Batch, device: torch.device) -> DeviceBatch:
    """A batch as it is, now: for validation, where nothing is to be hidden."""
    arrays = {name: torch.from_numpy(np.ascontiguousarray(getattr(batch, name))).to(device) for name in LAYOUT}
    return DeviceBatch(**arrays, **_known(batch))


def _known(batch: Batch) -> dict[str, Any]:
    targets = (batch.targets_BT != IGNORED).sum(1)
    documents = tuple((batch.documents_BT[:, -1] + 1).tolist())
    return {"row_targets": tuple(targets.tolist()), "row_documents": documents, "checksum": batch.checksum}


class Loader:
    """A context. `at(step)` gives the batches of one rank from step `start` to `stop` - 1, asked for in order; they
    are bit-equal to `batches.at(step, rank=rank, world=world)`."""

    def __init__(
        self,
        batches: BatchSource,
        *,
        device: torch.device,
        rank: int,
        world: int,
        workers: int,
        start: int,
        stop: int,
        ahead: int = AHEAD,
    ) -> None:
        if device.type == "cuda" and device.index is None:  # a thread has a current device of its own
            device = torch.device("cuda", torch.cuda.current_device())
        self._batches, self._device, self._rank, self._world = batches, device, rank, world
        self._workers, self._next, self._stop = workers, start, stop
        self._ready: Queue[Any] = Queue(ahead)
        self._closing = Event()
        self._thread = Thread(target=self._feed, name="loader", daemon=True)
        self.wait_s = 0.0

    def __enter__(self) -> Loader:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closing.set()
        self._thread.join(_GRACE_S)  # it may be waiting for a store; then it ends with the process

    def at(self, step: int) -> DeviceBatch:
        """The batch of a step; how long it was waited for is in `wait_s`. What went wrong on the way is raised here."""
        assert step == self._next < self._stop, f"step {step} asked for, {self._next} is next and {self._stop} the end"
        assert not self._closing.is_set() and self._thread.ident, "a loader is used as a context"
        begin = time.perf_counter()
        with record_function(WAIT):
            item = self._ready.get()
        if isinstance(item, BaseException):
            self._ready.put(item)  # it fails again when called again
            raise item
        batch: DeviceBatch = item.arrive() if isinstance(item, _Travelling) else item
        self.wait_s = time.perf_counter() - begin
        self._next += 1
        return batch

    # --- in the thread

    def _feed(self) -> None:
        try:
            stage = _Pinned(self._device) if self._device.type == "cuda" else partial(to_device, device=self._device)
            with ExitStack() as stack:
                for batch in self._made(stack):
                    self._hand_over(stage(batch))
                    if self._closing.is_set():
                        return
        except BaseException as error:  # carried to the thread that asks; nothing is lost
            self._hand_over(error)

    def _made(self, stack: ExitStack) -> Iterator[Batch]:
        """Batches from the workers, or made here where there are none."""
        steps = range(self._next, self._stop)
        share: dict[str, int] = {"rank": self._rank, "world": self._world}
        if not self._workers:
            yield from (self._batches.at(step, **share) for step in steps)
            return
        pool = Workers(self._batches, **share, count=self._workers, start=steps.start, stop=steps.stop)
        workers = stack.enter_context(pool)
        for _ in steps:
            while (batch := workers.take(_POLL_S)) is None:
                if self._closing.is_set():
                    return
            yield batch

    def _hand_over(self, item: Any) -> None:
        while not self._closing.is_set():
            try:
                return self._ready.put(item, timeout=_POLL_S)
            except Full:
                continue


class _Travelling:
    """A batch on its way to the device."""

    def __init__(self, batch: DeviceBatch, copied: torch.cuda.Event) -> None:
        self._batch, self.copied = batch, copied

    def arrive(self) -> DeviceBatch:
        """The batch, for work that is queued from now on: the stream waits for the copy, the host does not."""
        stream = torch.cuda.current_stream(self._batch.tokens_BT.device)
        stream.wait_event(self.copied)
        self._batch.tokens_BT.record_stream(stream)  # all four share one allocation
        return self._batch


class _Pinned:
    """Two pinned buffers: one is filled while the other one is copied."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.set_device(device)  # of this thread
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._buffers: list[Tensor] = []
        self._copied: list[torch.cuda.Event] = []

    def __call__(self, batch: Batch) -> _Travelling:
        buffer = self._free_buffer(sum(getattr(batch, name).nbytes for name in LAYOUT))
        for name, view in _views(buffer, batch.tokens_BT.shape).items():
            np.copyto(view.numpy(), getattr(batch, name))
        copied = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            there = buffer.to(self._device, non_blocking=True)
            copied.record(self._stream)
        self._buffers.append(buffer)
        self._copied.append(copied)
        return _Travelling(DeviceBatch(**_views(there, batch.tokens_BT.shape), **_known(batch)), copied)

    def _free_buffer(self, num_bytes: int) -> Tensor:
        if len(self._buffers) < 2:
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        self._copied.pop(0).synchronize()
        return self._buffers.pop(0)


def _views(flat: Tensor, shape: tuple[int, ...]) -> dict[str, Tensor]:
    views, at, count = {}, 0, shape[0] * shape[1]
    for name, dtype in LAYOUT.items():
        kind = torch.int64 if dtype.itemsize == 8 else torch.int32
        views[name] = flat[at : at + count * dtype.itemsize].view(kind).view(shape)
        at += count * dtype.itemsize
    return views
