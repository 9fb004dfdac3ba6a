"""Profiled steps: now and then one step runs under the profiler, and its time is split into parts.

The parts add up to the step: compute_s + comm_exposed_s + bubble_s + overhead_s, each moment counted once. The
fractions of the step budget are finer parts of the same time, compared with the roofline where the home has ceilings.
"""

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from armillary.machine.cores import compute_threads
from armillary.machine.device_name import device_name
from armillary.profiling.analysis.kernel_time import KERNEL_PARTS, LONG_STALL_S, call_s, launch_bound_s
from armillary.profiling.analysis.op_table import rows
from armillary.profiling.analysis.roofline import roofline_for
from armillary.profiling.analysis.roofline_attribution import Attribution, attribute_work
from armillary.profiling.analysis.step_budget import Budget, budget, without_recording
from armillary.profiling.profile import Roofline, Row
from armillary.profiling.record.trace_recorder import TraceRecorder
from armillary.profiling.trace.intervals import clip, length
from armillary.profiling.trace.read_trace import read_trace
from armillary.spec.gauges import budget_gauge
from armillary.store.home import Home

NO_ROOFLINE = Roofline(device="not asked")
FUSIBLE = ("elementwise", "norm", "copy")
"""classes of memory-bound work that compilers fuse"""
STANDING = ("host_fraction", "sync_fraction", "launch_gap_fraction")
"""shares in which a rank that waits for others may be seen: its main thread waits in Python or in a call"""


@contextmanager
def profiled(roofline: Roofline = NO_ROOFLINE, unprofiled_s: float | None = None) -> Iterator[dict[str, float]]:
    """Runs its block under the profiler; the dict it yields has the gauges of the block's time afterwards.
    `unprofiled_s` is what such a step takes without the profiler."""
    gauges: dict[str, float] = {}
    recorder = TraceRecorder(memory=False, stacks=False, hooks=False)
    recorder.start()
    try:
        recorder.begin_step()
        yield gauges
        recorder.end_step()
    finally:
        recorder.stop()
    with tempfile.TemporaryDirectory() as folder:
        trace = read_trace(recorder.save(Path(folder) / "step.json"))
    attribution = attribute_work(trace, roofline)
    spent = without_recording(budget(attribution), unprofiled_s)
    gauges |= split(attribution, spent) | shares(attribution, spent)


def device_roofline(device: torch.device, home: Home | None) -> Roofline:
    """The ceilings of this rank's device. Some threads of a CPU get their share of what all its cores reach, where
    that number of threads was not measured."""
    if device.type != "cpu":
        return roofline_for(device_name(device), home)
    threads, cores = torch.get_num_threads(), compute_threads()
    own = roofline_for(device_name(device, threads=threads), home)
    if threads >= cores or (own.flops and own.bytes_per_s):
        return own
    all_cores, part = roofline_for(device_name(device), home), threads / cores
    flops = {dtype: peak * part for dtype, peak in all_cores.flops.items()} | dict(own.flops)
    shared = all_cores.bytes_per_s * part if all_cores.bytes_per_s else None
    return replace(all_cores, flops=flops, bytes_per_s=own.bytes_per_s or shared)


def shares(attribution: Attribution, spent: Budget) -> dict[str, float]:
    """The step budget as shares of the step, kernels launched, and the share in kernels too short for any roofline."""
    if spent.wall_s <= 0:
        return {}
    fractions = {budget_gauge(part): seconds / spent.wall_s for part, seconds in spent.parts.items()}
    table = [row for row in rows(attribution, spent) if row.kind == ("kernel" if spent.device >= 0 else "operator")]
    working = [row for row in table if row.device_s or spent.device >= 0]
    kernels = spent.kernels
    judged_s = kernels.useful_s + kernels.inefficient_s
    if judged_s > 0.5 * kernels.seconds > 0:
        fractions["roofline_fraction"] = kernels.useful_s / judged_s
    return fractions | {
        "kernels": float(sum(row.calls for row in working)),
        "launch_bound_fraction": launch_bound_s(working) / spent.wall_s,
        "fusible_fraction": _fusible_s(working, spent) / spent.wall_s,
        "host_stall_fraction": _stalled_s(spent) / spent.wall_s,
    }


def _fusible_s(working: list[Row], spent: Budget) -> float:
    """Time of passes over memory that could be one, beyond what their calls cost."""
    each = 0.0 if spent.device >= 0 else call_s(working)
    fusible = [row for row in working if row.work in FUSIBLE and row.bound != "overhead"]
    return sum(max(0.0, row.seconds - row.calls * each) for row in fusible)


def _stalled_s(spent: Budget) -> float:
    """Time in which the host held the device up for long at a stretch."""
    return sum(
        seconds
        for stretch in spent.stretches
        if stretch.end - stretch.start >= LONG_STALL_S
        for (part, _), seconds in stretch.causes.items()
        if part in ("host", "sync")
    )


def split(attribution: Attribution, spent: Budget) -> dict[str, float]:
    """A step's budget in the words of a plan; what a pipeline stage waits for others is still part of the rest."""
    compute = sum(spent.parts.get(part, 0.0) for part in KERNEL_PARTS)
    exposed = spent.parts["comm_exposed"]
    rest = max(0.0, spent.wall_s - compute - exposed)
    return {
        "compute_s": compute,
        "comm_s": max(exposed, comm_s(attribution, spent)),
        "comm_exposed_s": exposed,
        "bubble_s": 0.0,
        "overhead_s": rest,
    }


def without_rank_waits(parts: dict[str, float], bubble: float, waited: float = 0.0) -> dict[str, float]:
    """The parts with a measured bubble taken out of what a trace sees of it: waits for exchanges, then idle time; so
    too in the step's shares, where waits for other ranks, which may look like Python's, are exchanges as well."""
    if not parts or not (bubble or waited):
        return parts
    waits = min(bubble, parts["comm_exposed_s"])
    rest = min(bubble - waits, parts["overhead_s"])
    step_s = sum(parts[f"{part}_s"] for part in ("compute", "comm_exposed", "overhead"))
    apart = parts | {
        "comm_exposed_s": parts["comm_exposed_s"] - waits,
        "overhead_s": parts["overhead_s"] - rest,
        "bubble_s": waits + rest,
    }
    if "host_fraction" not in parts or step_s <= 0:
        return apart
    shares = _moved(apart, "idle_fraction", bubble / step_s, ("comm_exposed_fraction", *STANDING))
    return _moved(shares, "comm_exposed_fraction", waited / step_s - shares["comm_exposed_fraction"], STANDING)


def without_core_contention(parts: dict[str, float], seconds: float, ran_s: float, queued_s: float) -> dict[str, float]:
    """The parts without stalls that were none of the program's doing: for `queued_s` its main thread was ready and
    others had the cores, in Python as often as it is in Python. The rest of its time it really waited."""
    if "host_stall_fraction" not in parts or seconds <= 0:
        return parts
    waits = sum(parts[budget_gauge(part)] for part in ("comm_exposed", "idle"))
    stood = 1 - (ran_s + queued_s) / seconds - waits
    python = sum(parts[budget_gauge(part)] for part in ("launch_gap", "host"))
    stall = parts["host_stall_fraction"]
    return parts | {"host_stall_fraction": max(0.0, stall - python * queued_s / seconds, min(stall, stood))}


def _moved(shares: dict[str, float], to: str, share: float, where: tuple[str, ...]) -> dict[str, float]:
    """Shares with `share` of the step counted as `to`, taken from the others in their order, as far as there is any."""
    left, moved = max(0.0, share), dict(shares)
    for name in where:
        taken = min(left, moved[name])
        moved |= {name: moved[name] - taken, to: moved[to] + taken}
        left -= taken
        if name in ("host_fraction", "sync_fraction"):
            moved["host_stall_fraction"] = max(0.0, moved.get("host_stall_fraction", 0.0) - taken)
    return moved


def comm_s(attribution: Attribution, spent: Budget) -> float:
    """Time in which any communication ran, hidden or not; on a GPU of its kernels, else of the host's operators."""
    trace, window = attribution.trace, spent.window
    selected = (trace.start < window.high) & (trace.end > window.low)
    selected &= attribution.work == attribution.works.index("collective")
    selected &= (trace.on_device & (trace.device == spent.device)) if spent.device >= 0 else ~trace.on_device
    events = np.flatnonzero(selected)
    return float(length(*clip(trace.start[events], trace.end[events], *window.span))) if len(events) else 0.0


FIRST = (7, 9, 11)
"""early steps of this process that are profiled in addition to the interval"""
FIRST_S = 4.0
"""seconds for analysing the early profiles, after which no more of them are taken"""


class ProfileSchedule:
    """`is_due(step, …)`, then `with record(…)` around the step."""

    def __init__(self, interval: int, roofline: Roofline) -> None:
        """Profile one of `interval` steps; 0: none at all."""
        self._interval, self._roofline, self._spent_s = interval, roofline, 0.0

    def is_due(self, step: int, num_steps: int) -> bool:
        """Whether step `step` is profiled; this process took `num_steps` steps before it."""
        early = num_steps in FIRST and self._spent_s < FIRST_S
        return bool(self._interval) and ((step + 1) % self._interval == 0 or early)

    @contextmanager
    def record(self, unprofiled_s: float | None) -> Iterator[dict[str, float]]:
        """As `profiled`, with the profiler's own time counted."""
        begin = time.perf_counter()
        with profiled(self._roofline, unprofiled_s) as gauges:
            started = time.perf_counter()
            yield gauges
            seconds = time.perf_counter() - started
        self._spent_s += time.perf_counter() - begin - seconds
