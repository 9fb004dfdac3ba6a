"""Every kernel on shapes of real models: what each version reaches of the ceilings measured in the same run, and which
one `choose()` takes.

Compilers are the slow part of a cold run, so that worker processes compile everything first and fill the compilers'
caches; then one process alone checks and times.
"""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import torch

from armillary.kernels.core.choose_version import VersionTrial, choose, is_out_of_memory, time_rivals
from armillary.kernels.core.op import OPS, Case, Op, OpWork, find_op
from armillary.kernels.core.version_trial import run_once
from armillary.profiling.ceilings import bandwidth, gemm
from armillary.profiling.ceilings.ceilings import Watch, name_of
from armillary.profiling.ceilings.settings import Settings, settings_for
from armillary.profiling.kernel_bench.results import KernelBench, KernelRow, Measured
from armillary.profiling.kernel_bench.targets import target_of
from armillary.profiling.kernel_bench.warm_caches import warm
from armillary.store.home import Home

Save = Callable[[KernelBench], None]
"""called after every case with the rows so far, so that an interrupted run is not lost"""
Todo = tuple[Op, str, Case]
LIMIT_S = 440.0
_CEILING_BYTES = {"cuda": 4 << 30, "cpu": 64 << 20}
_SQUARE = {"cuda": 8192, "cpu": 1024}


def bench_kernels(
    device: torch.device,
    *,
    ops: Sequence[str] = (),
    quick: bool = False,
    home: Home | None = None,
    limit_s: float = LIMIT_S,
    watch: Watch = lambda done, total, what: None,
    save: Save = lambda bench: None,
) -> KernelBench:
    """Bench `ops` (default: all) on their named cases, or with `quick` on the first of each; choices are stored in
    `home`."""
    begin = time.monotonic()
    chosen = [find_op(name) for name in (ops or OPS)]
    todo = _in_turn([[(op, name, case) for name, case in _cases(op, device, quick)] for op in chosen])
    watch(0, len(todo), "compiling")
    warm_s = warm([(op, case) for op, _, case in todo], lambda done, of: watch(0, len(todo), f"compiling {done}/{of}"))
    watch(0, len(todo), "ceilings")
    ceilings = measure_some(settings_for(device, quick=quick), {op.work(case).ceiling for op, _, case in todo})
    gc.collect()
    gc.freeze()  # capturing a graph collects garbage: what was imported need not be looked through each time
    rows: list[KernelRow] = []
    order = [op.name for op in chosen]

    def so_far(left: Sequence[Todo]) -> KernelBench:
        return KernelBench(
            device=name_of(device),
            date=time.strftime("%Y-%m-%d"),
            ceilings=ceilings,
            rows=tuple(sorted(rows, key=lambda row: order.index(row.op))),
            skipped=len(left),
            warm_s=warm_s,
            seconds=time.monotonic() - begin,
            left=tuple(f"{op.name} {name}" for op, name, _ in left),
        )

    for done, (op, name, case) in enumerate(todo):
        watch(done, len(todo), f"{op.name} {name}")
        if time.monotonic() - begin > limit_s:
            break
        rows.append(_timed_row(op, name, case, ceilings, home, 0.03 if quick else 0.05))
        save(so_far(todo[done + 1 :]))
    watch(len(todo), len(todo), "done")
    gc.unfreeze()
    return so_far(todo[len(rows) :])


def _in_turn(by_op: list[list[Todo]]) -> list[Todo]:
    """The first case of every op, then the second of each …: so that every op has cases when the time is over."""
    return [case for round_ in zip_longest(*by_op) for case in round_ if case is not None]


def _cases(op: Op, device: torch.device, quick: bool) -> Iterator[tuple[str, Case]]:
    """The op's named cases on this device; a CPU gets as few rows as a check would."""
    for name, case in list(op.cases.items())[: 1 if quick else None]:
        here = replace(case, device=device.type)
        yield name, here if device.type == "cuda" else op.small(here)


def measure_some(settings: Settings, wanted: set[Any]) -> dict[str, float]:
    """The ceilings that these kernels are compared with."""
    kind = settings.device.type
    peaks = {}
    for op in sorted(wanted & {"copy", "read"}):
        case = {"op": op, "bytes": _CEILING_BYTES[kind], "hot": False}
        peaks[op] = float(next(bandwidth.measure([case], settings))[1]["bytes_per_s"])
        _free_memory()
    size = _SQUARE[kind]
    for name, dtype in (("gemm", "bf16"), ("fp8", "fp8")):
        if name in wanted and dtype in gemm.dtypes(settings.device):
            case = {"m": size, "n": size, "k": size, "dtype": dtype}
            peaks[name] = float(next(gemm.measure([case], settings))[1]["flops"])
            _free_memory()
    return peaks


def _timed_row(
    op: Op, name: str, case: Case, ceilings: dict[str, float], home: Home | None, budget_s: float
) -> KernelRow:
    begin = time.monotonic()
    row = KernelRow(
        op=op.name,
        name=name,
        shape=case.label,
        ceiling=op.work(case).ceiling,
        chosen="",
        measured=(),
        bar=target_of(op.name, case),
    )
    try:
        row = _row(row, op, case, ceilings, home, budget_s)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        row = replace(row, failed=f"out of memory: {str(error).splitlines()[0][:120]}")
    _free_memory()
    reserved = float(torch.cuda.memory_reserved()) if case.device == "cuda" else 0.0
    return replace(row, seconds=time.monotonic() - begin, held_bytes=reserved)


def _row(
    row: KernelRow, op: Op, case: Case, ceilings: dict[str, float], home: Home | None, budget_s: float
) -> KernelRow:
    work = op.work(case)
    choice = choose(op, case, home=home, budget_s=budget_s, retry=True)
    measured = [_measured(trial, work, ceilings) for trial in choice.candidates]
    measured += [replace(_measured(t, work, ceilings), rival=True) for t in time_rivals(op, case, budget_s=budget_s)]
    row = replace(row, chosen=choice.version, measured=tuple(measured))
    return _with_memory(row, op, case)


def _with_memory(row: KernelRow, op: Op, case: Case) -> KernelRow:
    """The chosen version and ours with the memory they take, where there is a target for it."""
    if row.bar is None or row.bar.extra_bytes is None:
        return row
    names = {row.chosen, row.ours.version if row.ours else row.chosen}
    return replace(
        row,
        measured=tuple(
            replace(measured, extra_bytes=extra_bytes(op, case, measured.version))
            if measured.version in names and measured.seconds
            else measured
            for measured in row.measured
        ),
    )


def extra_bytes(op: Op, case: Case, name: str) -> float:
    """The most memory that a forward and a backward hold, less the gradients and, of the largest, one sum in fp32."""
    device = torch.device(case.device)
    version = op.version(name)
    assert version is not None and device.type == "cuda"
    inputs = op.inputs(case, torch.Generator(device).manual_seed(0))
    run = version.load()
    run_once(run, op, inputs)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run_once(run, op, inputs)
    torch.cuda.synchronize(device)
    grads = [inputs[i] for i in op.grads if isinstance(inputs[i], torch.Tensor)]
    known = sum(x.numel() * x.element_size() for x in grads) + 4 * max(x.numel() for x in grads)
    return float(torch.cuda.max_memory_allocated(device) - before - known)


def _measured(trial: VersionTrial, work: OpWork, ceilings: dict[str, float]) -> Measured:
    in_bytes = work.ceiling in ("copy", "read")
    if work.joint:
        work = OpWork(
            flops=work.flops + work.backward_flops, bytes=work.bytes + work.backward_bytes, ceiling=work.ceiling
        )
        trial = replace(trial, forward_s=trial.seconds, backward_s=None)
    forward = _rate(work.bytes if in_bytes else work.flops, trial.forward_s)
    backward = _rate(work.backward_bytes if in_bytes else work.backward_flops, trial.backward_s)
    top = ceilings.get(work.ceiling)
    return Measured(
        version=trial.version,
        forward_s=trial.forward_s,
        backward_s=trial.backward_s,
        forward_rate=forward,
        backward_rate=backward,
        forward_share=forward / top if forward and top else None,
        backward_share=backward / top if backward and top else None,
        error=trial.error,
        refused=trial.refused,
        method=trial.method,
    )


def _rate(amount: float, seconds: float | None) -> float | None:
    return amount / seconds if seconds and amount else None


def _free_memory() -> None:
    """Nothing of a case stays: outputs with gradients hold each other in circles."""
    gc.collect()
    torch.cuda.empty_cache()
