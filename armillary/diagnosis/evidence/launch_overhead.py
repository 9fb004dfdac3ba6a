"""Launching: the share of a step that follows the number of operations, or of micro-batches, rather than their work.

On a GPU it is seen: the device stands idle until a launch comes, or runs kernels too short for any roofline. On a CPU
every operator pays for its call, and cores are now quick and now slow: calls are counted, and what one took is held
against steps of the same moment.
"""

from __future__ import annotations

from statistics import median

from armillary.diagnosis.evidence.thresholds import MAX_LAUNCH_SHARE
from armillary.diagnosis.readings.reading import Reading
from armillary.planning.device_model.efficiency import CALL_S
from armillary.spec.plan import Plan


def launching(reading: Reading, plan: Plan | None) -> float | None:
    """The share, of a step without its waiting; None where no step was recorded."""
    gaps = reading.get("launch_gap_fraction")
    if gaps is None:
        return None
    seen = gaps + (reading.get("launch_bound_fraction") or 0.0)
    calls, ran = reading.get("kernels"), reading.get("host_cpu_s")
    if plan is None or plan.cluster.chip.kind != "cpu" or not calls or not ran:
        return min(MAX_LAUNCH_SHARE, seen)
    beside = [
        calls * float(one["torch_call_s"]) / float(one["host_cpu_s"])
        for one in reading.steps
        if "torch_call_s" in one and one.get("host_cpu_s")
    ]
    # a run measures torch_call_s once, before its first step; older ones measured it beside several
    once = calls * (reading.get("torch_call_s") or CALL_S) / ran
    return min(MAX_LAUNCH_SHARE, median(beside) if len(beside) > 1 else once)


def a_micro_batch(reading: Reading) -> float | None:
    """The share, of a step without its waiting, that comes with each micro-batch whatever its rows: of its passes what
    the trainer found by joining some, the last time from most of them, of its optimiser nothing. None where it could
    not join any."""
    found = reading.series("micro_batch_overhead_fraction")
    if not found:
        return None
    steps = [one for one in reading.steps if one.get("step_s") and "optimizer_s" in one]
    updating = [
        float(one["optimizer_s"]) / (float(one["step_s"]) - float(one.get("data_wait_s", 0.0)))
        for one in steps
        if float(one["step_s"]) > float(one.get("data_wait_s", 0.0))
    ]
    return min(MAX_LAUNCH_SHARE, found[-1] * max(0.0, 1 - (median(updating) if updating else 0.0)))
