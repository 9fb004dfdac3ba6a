"""A short look now and then: one step under the profiler, split into computing, communicating and the rest.

The parts add up to the step: compute_s + comm_exposed_s + bubble_s + overhead_s, each moment counted once.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np

from armillary.profiling.budget import Budget, budget
from armillary.profiling.judged import Judged, judge
from armillary.profiling.kernel_time import KERNEL_PARTS
from armillary.profiling.profile import Roof
from armillary.profiling.recorder import Recorder
from armillary.profiling.spans import clip, length
from armillary.profiling.trace import read_trace

T = TypeVar("T")


def recorded(step: Callable[[], T]) -> tuple[T, dict[str, float]]:
    """What one call of `step` gives, and how its time was spent, by gauge name."""
    recorder = Recorder(memory=False, stacks=False, hooks=False)
    recorder.start()
    try:
        recorder.begin_step()
        made = step()
        recorder.end_step()
    finally:
        recorder.stop()
    with tempfile.TemporaryDirectory() as folder:
        trace = read_trace(recorder.save(Path(folder) / "step.json"))
    judged = judge(trace, Roof(device="not asked"))
    return made, split(judged, budget(judged))


def unrecorded(step: Callable[[], T]) -> tuple[T, dict[str, float]]:
    """The same without looking."""
    return step(), {}


def split(judged: Judged, spent: Budget) -> dict[str, float]:
    """A step's budget in the words of a plan; what a pipeline stage waits for others is still part of the rest."""
    compute = sum(spent.parts.get(part, 0.0) for part in KERNEL_PARTS)
    exposed = spent.parts["comm_exposed"]
    rest = max(0.0, spent.wall_s - compute - exposed)
    return {"compute_s": compute, "comm_s": max(exposed, comm_s(judged, spent)), "comm_exposed_s": exposed,
            "bubble_s": 0.0, "overhead_s": rest}  # fmt: skip


def set_apart(parts: dict[str, float], bubble: float) -> dict[str, float]:
    """The parts with a measured bubble taken out of what a trace sees of it: waits for exchanges, then idle time."""
    if not parts or not bubble:
        return parts
    waits = min(bubble, parts["comm_exposed_s"])
    rest = min(bubble - waits, parts["overhead_s"])
    return parts | {"comm_exposed_s": parts["comm_exposed_s"] - waits, "overhead_s": parts["overhead_s"] - rest,
                    "bubble_s": waits + rest}  # fmt: skip


def comm_s(judged: Judged, spent: Budget) -> float:
    """Time in which any communication ran, hidden or not; on a GPU of its kernels, else of the host's operators."""
    trace, window = judged.trace, spent.window
    mine = (trace.start < window.high) & (trace.end > window.low)
    mine &= judged.work == judged.works.index("collective")
    mine &= (trace.on_device & (trace.device == spent.device)) if spent.device >= 0 else ~trace.on_device
    events = np.flatnonzero(mine)
    return float(length(*clip(trace.start[events], trace.end[events], *window.span))) if len(events) else 0.0
