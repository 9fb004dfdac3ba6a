"""Heartbeats: every second a thread of each rank writes where the rank is to the rendezvous store.

No collective is involved, so a rank that waits in one still says so. The launcher, or the lowest live rank where there
is no launcher of ours, reads them (watcher.py).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import torch.distributed as dist

from armillary.parallel.world import World
from armillary.spec.toml.fields import build, to_plain
from armillary.store import nan_safe_json
from armillary.store.hang_verdict import Collective, HangVerdict
from armillary.store.writer_process import Process, machine
from armillary.training.resilience import source_lines
from armillary.training.resilience.process_facts import free_bytes, is_writing, tree_io_bytes, tree_runnable_s
from armillary.training.resilience.rank_progress import Progress

BEAT_S = 1.0
STORE_S = 5.0
"""time limit of one access to the store, whose host may be stopped"""
MUCH_IO = 256 * 1024
"""bytes per beat from which a rank that reads or writes files is getting on; a heartbeat itself reads a few kB"""


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """Where a rank was at its last beat."""

    rank: int
    count: int
    pid: int
    born: int
    host: str
    machine: str
    step: int = -1
    phase: str = "setup"
    progress: int = 0  # rises while the rank gets on
    marks: int = 0  # phases that it has entered, the same number on every rank at the same place of the program
    in_step: bool = False
    is_steady: bool = False  # inside a step whose usual time is known
    step_s: float = 0.0  # that time
    on_gpu: bool = False
    in_loader: bool = False  # waits for its batch
    in_barrier: bool = False  # waits for others at a store barrier, which has heartbeats of its own
    is_writing: bool = False  # waits for a checkpoint, whose writer waits for the disk
    loader_line: str = ""  # where the thread is that reads batches
    lines: tuple[str, ...] = ()
    collective: Collective | None = None
    runnable_s: float = 0.0
    free_bytes: int = -1  # of the disk with the run's folder
    ended: bool = False
    failed: bool = False  # ended by an error


class HeartbeatBoard:
    """The heartbeats of one start of a run in a store, one key per rank, and the verdict on them."""

    def __init__(self, store: Any, name: str) -> None:
        self._store, self._prefix = store, f"armillary/heartbeats/{name}"

    def write(self, beat: Heartbeat) -> None:
        self._store.set(f"{self._prefix}/{beat.rank}", nan_safe_json.dumps(to_plain(beat)))

    def read(self, rank: int) -> Heartbeat | None:
        text = self._get(f"{self._prefix}/{rank}")
        return build(Heartbeat, nan_safe_json.loads(text), "heartbeat") if text else None

    def read_all(self, count: int) -> list[Heartbeat | None]:
        return [self.read(rank) for rank in range(count)]

    def post(self, verdict: HangVerdict) -> None:
        self._store.set(f"{self._prefix}/verdict", nan_safe_json.dumps(to_plain(verdict)))

    def verdict(self) -> HangVerdict | None:
        text = self._get(f"{self._prefix}/verdict")
        return build(HangVerdict, nan_safe_json.loads(text), "verdict") if text else None

    def _get(self, key: str) -> str:
        return self._store.get(key).decode() if self._store.check([key]) else ""


def board_of(world: World, run: Path) -> HeartbeatBoard:
    """Over the store in which the ranks have met, with a connection of its own: the main thread may hold the other."""
    return HeartbeatBoard(_store(world), board_name(run, os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))


def board_name(run: Path, attempt: str) -> str:
    return f"{run.name}/{attempt}"


def _store(world: World) -> Any:
    if world.size == 1:
        return dist.HashStore()
    store: Any = dist.distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    with suppress(AttributeError, RuntimeError):
        store = store.clone()
    store.set_timeout(timedelta(seconds=STORE_S))
    return store


class HeartbeatSender:
    """A context: a thread writes heartbeats of this rank, and calls `each(beat)` after each of them."""

    def __init__(
        self,
        world: World,
        folder: Path,
        board: HeartbeatBoard,
        each: Callable[[Heartbeat | None], None] = lambda beat: None,
        *,
        beat_s: float = BEAT_S,
    ) -> None:
        """`each(None)` is called when the store cannot be reached."""
        self.progress = Progress()
        self.trainer_thread = threading.current_thread()
        self._world, self._folder, self._board, self._each, self._beat_s = world, folder, board, each, beat_s
        self._process, self._machine = Process.this(), machine()
        self._count = self._moves = self._marks = self._io = 0
        self._functions: tuple[str, ...] = ()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.end(failed=error[0] is not None)

    def end(self, *, failed: bool = False, wait_s: float = 2 * STORE_S) -> None:
        """Write the last heartbeat, as this rank leaves; `wait_s`: for the one that is being written."""
        self._ended.set()
        self._thread.join(wait_s)
        with suppress(RuntimeError, OSError):
            self._board.write(self.beat(ended=True, failed=failed))

    def _run(self) -> None:
        while True:
            beat = self.beat()
            try:
                self._board.write(beat)
                self._each(beat)
            except (RuntimeError, OSError):  # torch's errors of a store are RuntimeErrors
                self._each(None)
            if self._ended.wait(self._beat_s):
                return

    def beat(self, *, ended: bool = False, failed: bool = False) -> Heartbeat:
        """Where this rank is now. The collective is looked up only where nothing has moved since the last beat, or
        where this is the last one of a rank that `failed`."""
        progress, process, thread = self.progress, self._process, self.trainer_thread
        still = not self._has_moved()
        with_collective = failed or (still and not ended)
        self._count += 1
        return Heartbeat(
            rank=self._world.rank,
            count=self._count,
            pid=process.pid,
            born=process.born,
            host=process.host,
            machine=self._machine,
            step=progress.step,
            phase=progress.phase,
            progress=self._moves,
            marks=progress.marks,
            in_step=progress.in_step,
            is_steady=progress.is_steady,
            step_s=progress.step_s,
            on_gpu=self._world.device.type == "cuda",
            in_loader=source_lines.is_in_file(thread, "training/data/loader.py"),
            in_barrier=source_lines.is_in_file(thread, "parallel/store_barrier.py"),
            is_writing=still and not progress.in_step and is_writing(process.pid),
            loader_line=source_lines.loader_line() if still else "",
            lines=source_lines.own_lines(thread),
            collective=source_lines.collective_in_flight(thread, failed=failed) if with_collective else None,
            runnable_s=tree_runnable_s(process.pid, writers=not progress.in_step),
            free_bytes=free_bytes(self._folder),
            ended=ended,
            failed=failed,
        )

    def _has_moved(self) -> bool:
        """Whether the rank got on since the last beat: by its marks, by the functions it is in, or by its files. What
        is written of a checkpoint beside a step is not the step's."""
        functions, marks = source_lines.functions(self.trainer_thread), self.progress.marks
        io = tree_io_bytes(self._process.pid, writers=not self.progress.in_step)
        moved = marks != self._marks or functions != self._functions or io - self._io > MUCH_IO
        self._functions, self._marks, self._io = functions, marks, io
        self._moves += moved
        return moved
