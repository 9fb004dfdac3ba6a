"""Every kernel on shapes of real models: what each version reaches of the ceilings measured in the same run, and which
one `choose()` takes.

Compilers are the slow part of a cold run, so that worker processes compile everything first and fill the compilers'
caches; then one process alone checks and times.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import torch

from armillary.kernels.choose import Trial, choose, note_once, time_rivals
from armillary.kernels.op import Case, Op, Work
from armillary.kernels.ops import OPS, find_op
from armillary.profiling import bandwidth, gemm
from armillary.profiling.ceilings import name_of
from armillary.profiling.kernel_warm import warm_case
from armillary.profiling.settings import Settings, settings_for
from armillary.profiling.system import usable_cores
from armillary.store.home import Home

Watch = Callable[[int, int, str], None]
"""called with cases done, cases in all, and what comes next"""
LIMIT_S = 440.0
_WARM_LIMIT_S = 120.0
_CEILING_BYTES = {"cuda": 4 << 30, "cpu": 64 << 20}
_SQUARE = {"cuda": 8192, "cpu": 1024}
_OURS = "triton"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One version of one case."""

    version: str
    """its name"""
    forward_s: float | None = None
    """seconds of a forward"""
    backward_s: float | None = None
    """seconds of a backward"""
    forward_rate: float | None = None
    """bytes/s or FLOP/s, as the ceiling is"""
    backward_rate: float | None = None
    """of the backward"""
    forward_share: float | None = None
    """rate over the ceiling"""
    backward_share: float | None = None
    """of the backward"""
    error: float | None = None
    """relative, against the wide reference"""
    refused: str = ""
    """why it was not timed"""
    rival: bool = False
    """timed beside, never chosen"""

    @property
    def seconds(self) -> float | None:
        return None if self.forward_s is None else self.forward_s + (self.backward_s or 0.0)


@dataclass(frozen=True, kw_only=True)
class KernelRow:
    """One case of one operation."""

    op: str
    """name of the operation"""
    name: str
    """whose shape it is"""
    shape: str
    """sizes and format"""
    ceiling: str
    """copy, read, gemm or fp8"""
    chosen: str
    """version that choose() takes"""
    measured: tuple[Measured, ...]
    """every version"""
    failed: str = ""
    """why there is nothing: the reference itself could not be run"""

    def of(self, version: str) -> Measured | None:
        return next((one for one in self.measured if one.version == version), None)

    @property
    def ours(self) -> Measured | None:
        """Our own kernel: the best of those in Triton."""
        own = [one for one in self.measured if one.version.startswith(_OURS)]
        return min(own, key=lambda one: one.seconds if one.seconds is not None else float("inf"), default=None)


@dataclass(frozen=True, kw_only=True)
class KernelBench:
    """What a run of the bench found."""

    device: str
    """as the driver names it"""
    date: str
    """day"""
    ceilings: dict[str, float]
    """bytes/s or FLOP/s, measured in this run"""
    rows: tuple[KernelRow, ...]
    """case by case"""
    skipped: int
    """cases left when the time was over"""
    warm_s: float
    """seconds of compiling ahead"""
    seconds: float
    """of everything"""


def bench_kernels(
    device: torch.device, *, ops: Sequence[str] = (), quick: bool = False, home: Home | None = None,
    limit_s: float = LIMIT_S, watch: Watch = lambda done, total, what: None,
) -> KernelBench:  # fmt: skip
    """Bench `ops` (default: all) on their named cases, or with `quick` on the first of each; choices are kept in
    `home`."""
    begin = time.monotonic()
    chosen = [find_op(name) for name in (ops or OPS)]
    todo = _in_turn([[(op, name, case) for name, case in _cases(op, device, quick)] for op in chosen])
    watch(0, len(todo), "compiling")
    warm_s = _warm(todo, device, lambda done: watch(0, len(todo), f"compiling {done}/{len(todo)}"))
    wanted = {op.work(case).ceiling for op, _, case in todo}
    watch(0, len(todo), "ceilings")
    ceilings = measure_some(settings_for(device, quick=quick), wanted)
    rows, skipped = [], 0
    for done, (op, name, case) in enumerate(todo):
        watch(done, len(todo), f"{op.name} {name}")
        if time.monotonic() - begin > limit_s:
            skipped += 1
            continue
        rows.append(_row(op, name, case, ceilings, home, 0.03 if quick else 0.06))
    watch(len(todo), len(todo), "done")
    order = [op.name for op in chosen]
    rows.sort(key=lambda row: order.index(row.op))
    return KernelBench(
        device=name_of(device), date=time.strftime("%Y-%m-%d"), ceilings=ceilings, rows=tuple(rows), skipped=skipped,
        warm_s=warm_s, seconds=time.monotonic() - begin,
    )  # fmt: skip


def _in_turn(by_op: list[list[tuple[Op, str, Case]]]) -> list[tuple[Op, str, Case]]:
    """The first case of every op, then the second of each …: when time is over, no op goes without."""
    return [one for turn in zip_longest(*by_op) for one in turn if one is not None]


def _cases(op: Op, device: torch.device, quick: bool) -> Iterator[tuple[str, Case]]:
    """The op's named cases on this device; a CPU gets as few rows as a check would."""
    for name, case in list(op.cases.items())[: 1 if quick else None]:
        here = replace(case, device=device.type)
        yield name, here if device.type == "cuda" else op.small(here)


def measure_some(settings: Settings, wanted: set[Any]) -> dict[str, float]:
    """The ceilings that these kernels are held against."""
    kind = settings.device.type
    found = {}
    for op in sorted(wanted & {"copy", "read"}):
        case = {"op": op, "bytes": _CEILING_BYTES[kind], "hot": False}
        found[op] = float(next(bandwidth.measure([case], settings))[1]["bytes_per_s"])
        _forget(settings.device)
    size = _SQUARE[kind]
    for name, dtype in (("gemm", "bf16"), ("fp8", "fp8")):
        if name in wanted and dtype in gemm.dtypes(settings.device):
            case = {"m": size, "n": size, "k": size, "dtype": dtype}
            found[name] = float(next(gemm.measure([case], settings))[1]["flops"])
            _forget(settings.device)
    return found


def _row(op: Op, name: str, case: Case, ceilings: dict[str, float], home: Home | None, budget_s: float) -> KernelRow:
    work = op.work(case)
    _forget(torch.device(case.device))
    try:
        choice = choose(op, case, home=home, budget_s=budget_s, again=True)
    except torch.OutOfMemoryError as error:
        why = f"out of memory: {str(error).splitlines()[0][:120]}"
        return KernelRow(op=op.name, name=name, shape=case.label, ceiling=work.ceiling, chosen="", measured=(),
                         failed=why)  # fmt: skip
    measured = [_measured(trial, work, ceilings) for trial in choice.trials]
    measured += [replace(_measured(t, work, ceilings), rival=True) for t in time_rivals(op, case, budget_s=budget_s)]
    return KernelRow(
        op=op.name, name=name, shape=case.label, ceiling=work.ceiling, chosen=choice.version, measured=tuple(measured)
    )


def _measured(trial: Trial, work: Work, ceilings: dict[str, float]) -> Measured:
    in_bytes = work.ceiling in ("copy", "read")
    if work.together:
        work = Work(flops=work.flops + work.backward_flops, bytes=work.bytes + work.backward_bytes,
                    ceiling=work.ceiling)  # fmt: skip
        trial = replace(trial, forward_s=trial.seconds, backward_s=None)
    forward = _rate(work.bytes if in_bytes else work.flops, trial.forward_s)
    backward = _rate(work.backward_bytes if in_bytes else work.backward_flops, trial.backward_s)
    top = ceilings.get(work.ceiling)
    return Measured(
        version=trial.version, forward_s=trial.forward_s, backward_s=trial.backward_s, forward_rate=forward,
        backward_rate=backward, forward_share=forward / top if forward and top else None,
        backward_share=backward / top if backward and top else None, error=trial.error, refused=trial.refused,
    )  # fmt: skip


def _rate(amount: float, seconds: float | None) -> float | None:
    return amount / seconds if seconds and amount else None


def _warm(todo: list[tuple[Op, str, Case]], device: torch.device, done: Callable[[int], None]) -> float:
    """Compile in worker processes; on a CPU, where cores compute too, nothing is compiled ahead."""
    begin = time.monotonic()
    if device.type != "cuda" or len(todo) < 2:
        return 0.0
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(max_workers=max(1, min(10, usable_cores() - 2)), mp_context=context)
    waiting = [pool.submit(warm_case, op.name, case) for op, _, case in todo]
    try:
        for count, future in enumerate(as_completed(waiting, timeout=_WARM_LIMIT_S), 1):
            future.result()
            done(count)
    except (TimeoutError, BrokenProcessPool) as error:  # then the compilers work when their turn comes
        note_once(f"compiling ahead was given up: {type(error).__name__}")
        for process in list((pool._processes or {}).values()):  # they would disturb what is timed next
            process.terminate()
    pool.shutdown(wait=True, cancel_futures=True)
    return time.monotonic() - begin


def _forget(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
