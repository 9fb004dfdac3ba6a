"""Worker processes that make batches ahead of time and hand them over through shared memory.

They live as long as the loader. A worker is a bare interpreter without torch: it imports nothing of the script that
started it, so scripts need no `__main__` guard, and it ends when its parent does, however that ends.
"""

from __future__ import annotations

import mmap
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections import deque
from multiprocessing.connection import Connection, wait

import numpy as np

from armillary.errors import ArmillaryError
from armillary.training.data.batch import LAYOUT, Batch, BatchSource, rows_per_rank

_GRACE_S = 5.0
"""how long a worker may take to end by itself"""


class Slots:
    """Places for batches in memory that several processes map: a file without a name, so nothing can be left behind,
    and not in /dev/shm, which containers keep small."""

    def __init__(self, descriptor: int, count: int, rows: int, sequence: int) -> None:
        self._size = sum(dtype.itemsize for dtype in LAYOUT.values()) * rows * sequence
        self._shape = (rows, sequence)
        os.ftruncate(descriptor, max(1, count * self._size))
        self._map = mmap.mmap(descriptor, max(1, count * self._size))

    def write(self, slot: int, batch: Batch) -> None:
        for name, view in self._views(slot).items():
            array = getattr(batch, name)
            assert array.shape == self._shape, f"{name} is {array.shape}, not {self._shape}"
            view[...] = array

    def read(self, slot: int) -> Batch:
        """A copy: the slot may be refilled at once."""
        return Batch(**{name: view.copy() for name, view in self._views(slot).items()})

    def _views(self, slot: int) -> dict[str, np.ndarray]:
        views, at, count = {}, slot * self._size, self._shape[0] * self._shape[1]
        for name, dtype in LAYOUT.items():
            views[name] = np.frombuffer(self._map, dtype, count, at).reshape(self._shape)
            at += count * dtype.itemsize
        return views


def _unnamed_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("armillary-batches")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class Worker:
    """One process: asked for steps, it answers in the same order."""

    def __init__(self, number: int, batches: bytes, descriptor: int, slots: tuple[int, int, int]) -> None:
        self.number = number
        ours, theirs = socket.socketpair()
        self._pipe = Connection(ours.detach())
        code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import _serve; _serve({theirs.fileno()})"
        with theirs:
            fds = (theirs.fileno(), descriptor)
            # a process group of its own: Ctrl-C in a terminal, or a signal to the job, is handled by the parent
            self._process = subprocess.Popen(
                [sys.executable, "-c", code], pass_fds=fds, stdin=subprocess.DEVNULL, process_group=0
            )
        self._send((batches, descriptor, slots))

    def ask(self, step: int, rank: int, world: int, slot: int) -> None:
        self._send((step, rank, world, slot))

    def answered(self, timeout_s: float) -> bool:
        """Whether the next step is there; raises what went wrong in the worker, or that it is gone."""
        if not wait([self._pipe], timeout_s):
            return False
        try:
            error = self._pipe.recv()
        except (EOFError, OSError):
            raise self._gone() from None
        if isinstance(error, ArmillaryError):
            raise error
        if error is not None:
            raise RuntimeError(f"loader worker {self.number} failed:\n{error}")
        return True

    def hang_up(self) -> None:
        """Ends the worker when it has finished what it is at."""
        self._pipe.close()

    def join(self) -> None:
        try:
            self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _send(self, message: object) -> None:
        try:
            self._pipe.send(message)
        except (BrokenPipeError, ConnectionResetError):
            raise self._gone() from None

    def _gone(self) -> ArmillaryError:
        self.join()
        code = self._process.returncode
        how = f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        who = f"loader worker {self.number} (process {self._process.pid})"
        return ArmillaryError(f"{who} {how}; see above for what it said, or read without: --set data.workers=0")


def _signal_name(number: int) -> str:
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    hints = {"SIGKILL": " (out of memory?)", "SIGBUS": " (was a shard cut short?)"}
    return name + hints.get(name, "")


class Workers:
    """A context of `count` workers that make the batches of steps start … stop-1 in turn, each two steps ahead."""

    def __init__(self, batches: BatchSource, *, rank: int, world: int, count: int, start: int, stop: int) -> None:
        self._batches, self._rank, self._world = batches, rank, world
        self._count, self._next, self._stop = count, start, stop
        self._workers: list[Worker] = []
        self._asked: deque[tuple[Worker, int]] = deque()

    def __enter__(self) -> Workers:
        shape = (2 * self._count, rows_per_rank(self._batches.batch, self._world), self._batches.sequence)
        pickled = pickle.dumps(self._batches)
        descriptor = _unnamed_file()
        self._slots = Slots(descriptor, *shape)
        try:
            for number in range(self._count):
                self._workers.append(Worker(number, pickled, descriptor, shape))
            for slot in range(shape[0]):
                self._ask(slot)
        except BaseException:
            self.__exit__()
            raise
        finally:
            os.close(descriptor)
        return self

    def __exit__(self, *error: object) -> None:
        for worker in self._workers:
            worker.hang_up()
        for worker in self._workers:
            worker.join()
        self._workers.clear()

    def take(self, timeout_s: float) -> Batch | None:
        """The batch of the next step; None when it is not there in time."""
        worker, slot = self._asked[0]
        if not worker.answered(timeout_s):
            return None
        self._asked.popleft()
        batch = self._slots.read(slot)
        self._ask(slot)
        return batch

    def _ask(self, slot: int) -> None:
        """A slot belongs to one worker: slots are filled and freed in the order of steps."""
        if self._next < self._stop:
            worker = self._workers[slot % self._count]
            worker.ask(self._next, self._rank, self._world, slot)
            self._asked.append((worker, slot))
            self._next += 1


# --- in the worker's process


def _serve(descriptor: int) -> None:
    """Make batches until the pipe closes. A worker that died of a signal meant for the parent would take the last steps
    before a checkpoint with it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    pipe = Connection(descriptor)
    try:
        pickled, memory, shape = pipe.recv()
        slots = Slots(memory, *shape)
        batches: BatchSource | None = None
        while True:
            step, rank, world, slot = pipe.recv()
            try:
                batches = batches or pickle.loads(pickled)
                slots.write(slot, batches.at(step, rank=rank, world=world))
            except ArmillaryError as error:
                pipe.send(error)
            except Exception:  # sent to the parent, which raises it
                pipe.send(traceback.format_exc())
            else:
                pipe.send(None)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the parent closed the pipe, or is gone
