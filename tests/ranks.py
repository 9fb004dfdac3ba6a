"""One pool of gloo ranks for the whole test run: starting processes and importing torch is paid once.

`pool.run(world, function, *args)` calls `function(*args)` on `world` ranks, with the default process group of that
size, and gives the results in order of rank. The function is sent by its import path, so it stands at the top of
a test module. A rank that raises fails the call with its traceback; one that hangs is shown where it stands, and
only the workers of that call are killed.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import connection, get_context
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Self

GRACE_S = 2.0
MANY_GROUPS = 16
"""process groups of a rank, each with threads of its own, after which all are given up for a new one"""
_SPAWN = get_context("spawn")


class RankFailed(AssertionError):
    """A rank raised, died or hung."""


@dataclass(frozen=True)
class Worker:
    """One long-lived process."""

    process: SpawnProcess
    pipe: connection.Connection
    stacks: Path

    @classmethod
    def start(cls, folder: Path, number: int) -> Worker:
        ours, theirs = _SPAWN.Pipe()
        stacks = folder / f"stacks-{number}-{time.monotonic_ns()}"
        process = _SPAWN.Process(target=_serve, args=(theirs, str(stacks)), daemon=True, name=f"rank-{number}")
        process.start()
        theirs.close()
        return cls(process=process, pipe=ours, stacks=stacks)

    def send(self, message: tuple[Any, ...]) -> None:
        self.pipe.send_bytes(pickle.dumps(message))

    def where(self) -> str:
        """The Python stack it stands in."""
        if not self.stacks.exists():
            return "not started yet"
        assert self.process.pid
        os.kill(self.process.pid, signal.SIGUSR1)
        time.sleep(0.3)
        return self.stacks.read_text()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


class Ranks:
    """The pool; workers are started when a call first needs them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._workers: list[Worker] = []
        self._group = 0
        self._world = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._drop(range(len(self._workers)))

    def run(self, world: int, function: Callable[..., Any], *args: Any, timeout_s: float = 120.0) -> list[Any]:
        """`function(*args)` on `world` ranks at once."""
        assert "<locals>" not in function.__qualname__, f"{function.__qualname__} must stand at the top of a module"
        self._join(world, timeout_s)
        answers = self._call(world, ("call", function.__module__, function.__qualname__, args), timeout_s)
        if self._call(world, ("groups",), timeout_s)[0] > MANY_GROUPS:
            self._world = 0
        return answers

    def _join(self, world: int, timeout_s: float) -> None:
        """A default process group of this size; the last one is kept where it fits."""
        if self._world == world:
            return
        while len(self._workers) < world:
            self._workers.append(Worker.start(self._folder, len(self._workers)))
        self._group += 1
        self._call(world, ("join", str(self._folder / f"group-{self._group}"), world), timeout_s)
        self._world = world

    def _call(self, world: int, message: tuple[Any, ...], timeout_s: float) -> list[Any]:
        workers = self._workers[:world]
        for rank, worker in enumerate(workers):
            worker.send((*message, rank))
        answers = _collect(workers, timeout_s)
        failed = [(rank, text) for rank, (ok, text) in answers.items() if not ok]
        silent = [rank for rank in range(world) if rank not in answers]
        if not failed and not silent:
            return [answers[rank][1] for rank in range(world)]
        raise self._failure(failed, silent, world, timeout_s)

    def _failure(self, failed: list[tuple[int, str]], silent: list[int], world: int, timeout_s: float) -> RankFailed:
        texts = [f"rank {rank} of {world} failed:\n{text}" for rank, text in failed]
        if not failed:
            texts = [f"rank {r} of {world} hung for {timeout_s:g} s:\n{self._workers[r].where()}" for r in silent]
        self._world = 0  # collectives may be half done: the next call makes a new group
        self._drop(silent)
        return RankFailed("\n".join(texts))

    def _drop(self, numbers: Sequence[int]) -> None:
        """Kill these workers, and forget those that are gone."""
        for number in numbers:
            self._workers[number].kill()
        self._workers = [worker for worker in self._workers if not worker.pipe.closed]


def _collect(workers: list[Worker], timeout_s: float) -> dict[int, tuple[bool, Any]]:
    """Answers by rank until all are in, time is up, or a failure's grace is over: its peers may wait for it forever."""
    answers: dict[int, tuple[bool, Any]] = {}
    pipes = {worker.pipe: rank for rank, worker in enumerate(workers)}
    deadline = time.monotonic() + timeout_s
    while pipes and (left := deadline - time.monotonic()) > 0:
        for pipe in connection.wait(list(pipes), timeout=left):
            assert isinstance(pipe, connection.Connection)
            rank = pipes.pop(pipe)
            answers[rank] = _receive(workers[rank])
            if not answers[rank][0]:
                deadline = min(deadline, time.monotonic() + GRACE_S)
    return answers


def _receive(worker: Worker) -> tuple[bool, Any]:
    try:
        ok, value = pickle.loads(worker.pipe.recv_bytes())
    except EOFError:
        worker.process.join()
        worker.pipe.close()
        return False, f"its process died with exit code {worker.process.exitcode}"
    return ok, value


# --- inside a worker


def _serve(pipe: connection.Connection, stacks: str) -> None:
    with open(stacks, "w") as file:
        faulthandler.register(signal.SIGUSR1, file=file)
        _one_thread()
        while True:
            try:
                message = pickle.loads(pipe.recv_bytes())
            except EOFError:  # the test run is over
                return
            pipe.send_bytes(_answer(message))


def _one_thread() -> None:
    """Ranks share the cores of a small machine, and talk over loopback only."""
    os.environ["OMP_NUM_THREADS"] = "1"
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch

    torch.set_num_threads(1)


def _answer(message: tuple[Any, ...]) -> bytes:
    actions: dict[str, Callable[..., Any]] = {"join": _join_group, "call": _call_function, "groups": _num_groups}
    try:
        return pickle.dumps((True, actions[message[0]](*message[1:])))
    except BaseException:
        return pickle.dumps((False, traceback.format_exc()))


def _join_group(file: str, world: int, rank: int) -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
        _forget_meshes()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    dist.init_process_group("gloo", store=dist.FileStore(file, world), rank=rank, world_size=world)


def _num_groups(rank: int) -> int:
    """How many process groups meshes have left behind."""
    from torch.distributed import distributed_c10d

    return len(distributed_c10d._world.pg_map)


def _forget_meshes() -> None:
    """DTensor remembers what it worked out by mesh, and meshes of one shape are equal though their groups are gone."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import _redistribute, debug

        debug._clear_sharding_prop_cache()
        _redistribute._gen_transform_infos.cache_clear()


def _call_function(module: str, name: str, args: tuple[Any, ...], rank: int) -> Any:
    import torch

    function: Any = importlib.import_module(module)
    for part in name.split("."):
        function = getattr(function, part)
    torch.manual_seed(0)
    return function(*args)
