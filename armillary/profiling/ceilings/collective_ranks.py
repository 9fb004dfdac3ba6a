"""Ranks of the collective benchmark: processes of this machine that run each collective together and time it.

Rank 0 says how often an operation is repeated, all ranks time it, and the slowest counts. Results come back
through a pipe, one size at a time, so that progress can be shown.
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from armillary.errors import ArmillaryError
from armillary.kernels.core.timing import Call, calls_per_sample, num_samples, summary
from armillary.kernels.core.torch_compat import collective

_SPAWN = get_context("spawn")
_SILENCE_S = 120.0
"""ranks that are silent for this long hang"""
_MAX_SAMPLES = 100


class RanksFailed(ArmillaryError):
    """The ranks could not reach each other."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the ranks do: each of `ops` at each of `sizes` (bytes), timed for `budget_s`."""

    device: str
    world: int
    ops: tuple[str, ...]
    sizes: tuple[int, ...]
    budget_s: float

    @property
    def backend(self) -> str:
        return "nccl" if self.device == "cuda" else "gloo"


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One operation at one size: the median of the slowest rank, and the interquartile range over it."""

    op: str
    bytes: int
    """the full array, rounded so that the ranks divide it"""
    seconds: float
    spread: float
    samples: int


def run_ranks(plan: Plan) -> Iterator[Sample]:
    """Start the ranks, yield their measurements as they come, and stop them."""
    with tempfile.TemporaryDirectory(prefix="armillary-ranks-") as folder:
        ours, theirs = _SPAWN.Pipe(duplex=False)
        args = [(rank, plan, str(Path(folder) / "store"), theirs) for rank in range(plan.world)]
        ranks = [_SPAWN.Process(target=_rank, args=each, daemon=True) for each in args]
        for rank in ranks:
            rank.start()
        theirs.close()
        try:
            yield from _received(ours, plan, [rank.sentinel for rank in ranks])
        finally:
            for rank in ranks:
                rank.join(timeout=10 if sys.exc_info()[0] is None else 0)
                if rank.is_alive():
                    rank.kill()
                    rank.join()
            ours.close()


def _received(pipe: connection.Connection, plan: Plan, sentinels: list[int]) -> Iterator[Sample]:
    for _ in range(len(plan.ops) * len(plan.sizes)):
        awake = connection.wait([pipe, *sentinels], timeout=_SILENCE_S)
        if not awake:
            raise RanksFailed(
                f"{plan.world} ranks said nothing for {_SILENCE_S:.0f} s; is the machine busy? Try again, or "
                "fewer: armillary bench collectives --world"
            )
        if not pipe.poll():  # ranks end by themselves only after the last sample
            raise RanksFailed(f"one of {plan.world} ranks died; try fewer: armillary bench collectives --world")
        reply = pipe.recv()
        if isinstance(reply, str):
            raise RanksFailed(f"a rank failed: {reply}; armillary doctor looks at the machine")
        yield reply


# --- inside a rank


def _rank(rank: int, plan: Plan, store: str, pipe: Any) -> None:
    try:
        _join(rank, plan, store)
        for op in plan.ops:
            for size in plan.sizes:
                sample = _timed(op, size, rank, plan)
                if rank == 0:
                    pipe.send(sample)
        dist.barrier()
        dist.destroy_process_group()
        os._exit(0)  # threads of the backend may outlive the group, and abort an ordinary exit
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        os._exit(1)  # peers may hold the group for ever


def _join(rank: int, plan: Plan, store: str) -> None:
    if plan.device == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
        if sys.platform == "linux":  # all ranks are on this machine; its host name need not resolve
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(plan.backend, store=dist.FileStore(store, plan.world), rank=rank, world_size=plan.world)


def _timed(op: str, size: int, rank: int, plan: Plan) -> Sample:
    """The same number of repeats on every rank; each sample is the slowest rank's."""
    device = torch.device(plan.device, rank) if plan.device == "cuda" else torch.device("cpu")
    elements = max(1, size // 4 // plan.world) * plan.world
    call = OPS[op](elements, rank, plan.world, device)
    call()
    once = _agreed(_clocked(call, 2, device) / 2, device)
    count = calls_per_sample(once)
    total = min(_MAX_SAMPLES, num_samples(once, count, plan.budget_s))
    began = time.monotonic()
    local = torch.tensor([_clocked(call, count, device) / count for _ in range(total)], device=device)
    dist.all_reduce(local, dist.ReduceOp.MAX)
    result = summary(local.tolist(), calls=count, method="host clock", began=began)
    return Sample(op=op, bytes=elements * 4, seconds=result.seconds, spread=result.spread, samples=result.samples)


def _agreed(seconds: float, device: Any) -> float:
    value = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.broadcast(value, 0)
    return float(value)


def _clocked(call: Call, count: int, device: Any) -> float:
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    for _ in range(count):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


# --- the operations: (elements of the whole array, rank, world, device) -> a call


def _all_reduce(elements: int, rank: int, world: int, device: Any) -> Call:
    row = torch.rand(elements, device=device)
    return lambda: dist.all_reduce(row, dist.ReduceOp.MAX)  # sums would grow without end over the repeats


def _all_gather(elements: int, rank: int, world: int, device: Any) -> Call:
    full, part = torch.rand(elements, device=device), torch.rand(elements // world, device=device)
    gather = collective("all_gather_single", "all_gather_into_tensor")
    return lambda: gather(full, part)


def _reduce_scatter(elements: int, rank: int, world: int, device: Any) -> Call:
    full, part = torch.rand(elements, device=device), torch.rand(elements // world, device=device)
    scatter = collective("reduce_scatter_single", "reduce_scatter_tensor")
    return lambda: scatter(part, full)


def _all_to_all(elements: int, rank: int, world: int, device: Any) -> Call:
    sent, received = torch.rand(elements, device=device), torch.rand(elements, device=device)
    return lambda: dist.all_to_all_single(received, sent)


def _broadcast(elements: int, rank: int, world: int, device: Any) -> Call:
    row = torch.rand(elements, device=device)
    return lambda: dist.broadcast(row, 0)


def _send(elements: int, rank: int, world: int, device: Any) -> Call:
    """A ping-pong: rank 0 and the last rank send alternately, call by call; the ranks between are idle."""
    row, last = torch.rand(elements, device=device), world - 1
    calls = [0]

    def call() -> None:
        calls[0] += 1
        source, target = (0, last) if calls[0] % 2 else (last, 0)
        if rank == source:
            dist.send(row, target)
        elif rank == target:
            dist.recv(row, source)

    return call


OPS: dict[str, Callable[[int, int, int, Any], Call]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "send": _send,
}
