"""The step budget: where the wall time of a window went, in parts that add up to it, overlap counted once.

On a GPU each moment belongs to the first case that applies: a kernel computes, communication runs alone, a copy to or
from the host runs alone, or the device is idle and the host says why. Without a GPU the operators are the device's
work: see cpu_budget.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from armillary.profiling.analysis.cpu_step_budget import cpu_budget
from armillary.profiling.analysis.idle_gaps import Stretch, idle_stretches
from armillary.profiling.analysis.kernel_time import KernelTime, split_kernel_time
from armillary.profiling.analysis.roofline_attribution import Attribution
from armillary.profiling.profile import BUDGET, Cause
from armillary.profiling.trace.event_classes import is_host_copy
from armillary.profiling.trace.host_calls import steps_of
from armillary.profiling.trace.intervals import clip, exposed, length
from armillary.profiling.trace.launch_correlation import Links
from armillary.profiling.trace.trace import MEMCPY, Array, Trace
from armillary.units import seconds_text


@dataclass(frozen=True, kw_only=True)
class Window:
    """The analysed window of a trace, which holds `steps` steps."""

    low: float
    high: float
    steps: int = 1

    @property
    def seconds(self) -> float:
        return self.high - self.low

    @property
    def span(self) -> tuple[float, float]:
        return self.low, self.high


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Where the time went, and the evidence."""

    window: Window
    parts: Mapping[str, float]
    """part of BUDGET -> seconds, adding up to the window"""
    stretches: list[Stretch] = field(default_factory=list)
    """idle, copying and communicating intervals, with causes"""
    kernels: KernelTime
    events: Array
    """work inside the window: kernels, or operators where there are none"""
    device: int = -1
    """the analysed device; -1 the host"""
    overhead_s: float = 0.0
    """what the recording itself cost, taken off the parts"""
    scale: Mapping[str, float] = field(default_factory=dict)
    """part -> the share of it that is left after that correction"""

    @property
    def wall_s(self) -> float:
        """What the parts add up to."""
        return self.window.seconds - self.overhead_s


def budget(attribution: Attribution, window: Window | None = None) -> Budget:
    """The budget of a trace; its window is its steps, or else all of it."""
    window = window or window_of(attribution.trace, attribution.links)
    if not attribution.on_gpu:
        parts, stretches, kernels, events = cpu_budget(attribution, window.span)
        return Budget(window=window, parts=_filled(parts, window), stretches=stretches, kernels=kernels, events=events)
    return _gpu_budget(attribution, window)


def window_of(trace: Trace, links: Links) -> Window:
    """From the first step's beginning to the last one's end, and on until the device has done what they launched."""
    steps = steps_of(trace)
    if not len(steps):
        return Window(low=float(trace.start.min()), high=float(trace.end.max()))
    low, high = float(trace.start[steps].min()), float(trace.end[steps].max())
    asked = np.where(links.launch >= 0, trace.start[links.launch], trace.start)
    tail = trace.end[trace.on_device & (asked >= low) & (asked <= high)]
    high = max(high, float(tail.max())) if len(tail) else high
    return Window(low=low, high=high, steps=len({int(name) for name in trace.name[steps]}))


def busiest_device(trace: Trace) -> int:
    """The device with the most time; -1 without one."""
    events = trace.on_device
    if not events.any():
        return -1
    numbers, inverse = np.unique(trace.device[events], return_inverse=True)
    return int(numbers[np.bincount(inverse, weights=trace.seconds[events]).argmax()])


def _gpu_budget(attribution: Attribution, window: Window) -> Budget:
    trace, device = attribution.trace, busiest_device(attribution.trace)
    inside = (trace.start < window.high) & (trace.end > window.low)
    events = np.flatnonzero(trace.on_device & (trace.device == device) & inside)
    comm = attribution.work[events] == attribution.works.index("collective")
    copying = ((trace.kind == MEMCPY) & trace.matching(is_host_copy))[events]
    work = ~comm & ~copying
    start, end = clip(trace.start[events], trace.end[events], *window.span)
    alone = exposed(start[comm], end[comm], start[work], end[work])
    copies = exposed(start[copying], end[copying], start[~copying], end[~copying])
    first, last = start[work], end[work]
    kernels = split_kernel_time(attribution, events[work], last - first, lambda some: length(first[some], last[some]))
    stretches = idle_stretches(trace, attribution.host, attribution.links, events, window.span)
    stretches += _running(alone, "collective", "communication alone")
    stretches += _running(copies, "copy", "copy between host and device")
    parts = dict(kernels.parts)
    for stretch in stretches:
        for (part, _), seconds in stretch.causes.items():
            parts[part] = parts.get(part, 0.0) + seconds
    return Budget(
        window=window,
        parts=_filled(parts, window),
        stretches=stretches,
        kernels=kernels,
        events=events[work],
        device=device,
    )


def _running(spans: tuple[Array, Array], cause: Cause, note: str) -> list[Stretch]:
    """Communication or a copy with no concurrent kernel, as intervals with that cause."""
    stretches = [Stretch(start, end, note=note) for start, end in zip(*(side.tolist() for side in spans), strict=True)]
    for stretch in stretches:
        stretch.add(cause, stretch.end - stretch.start)
    return stretches


def _filled(parts: Mapping[str, float], window: Window) -> dict[str, float]:
    """Every part, in order; what the parts lack of the window (rounding) is unknown."""
    result = {part: max(0.0, parts.get(part, 0.0)) for part in BUDGET}
    result["unknown"] += max(0.0, window.seconds - sum(result.values()))
    return result


WORTH = 1.05
"""slowdown by the profiler from which the budget is corrected: less is noise"""
_MOST = 0.95
"""largest share of the host's time that is taken off: some of it is always real"""
_SLOWED = ("launch_gap", "host")


def without_recording(spent: Budget, plain_s: float | None) -> Budget:
    """The budget of the step as it runs without the profiler, where that time is known.

    A profiler slows the host, not a GPU's kernels: a step that takes longer under it does so in launch gaps and host
    time, and the difference is taken off these in proportion. Where the CPU is the device, every operator is
    slowed too: then the recorded step is shown, and `overhead_note` says by how much.
    """
    steps, wall_s = spent.window.steps, spent.window.seconds
    if not plain_s or spent.device < 0 or wall_s <= WORTH * plain_s * steps:
        return spent
    slowed = sum(spent.parts[part] for part in _SLOWED)
    off = min(wall_s - plain_s * steps, _MOST * slowed)
    scale = dict.fromkeys(_SLOWED, 1 - off / slowed if slowed else 1.0)
    parts = {part: seconds * scale.get(part, 1.0) for part, seconds in spent.parts.items()}
    return replace(spent, overhead_s=off, scale=scale, parts=parts)


def overhead_note(spent: Budget, plain_s: float | None) -> str:
    """Time of a step without the profiler, and the correction; '' where that time is not known."""
    if not plain_s:
        return ""
    step_s = spent.window.seconds / spent.window.steps
    note = f"a step takes {seconds_text(plain_s)} without the profiler, {seconds_text(step_s)} with it"
    if not spent.overhead_s:
        slower = step_s / plain_s
        return f"{note}: {slower:.2f} × as long" if slower > WORTH else note
    left = spent.wall_s / spent.window.steps
    rest = "" if left <= WORTH * plain_s else f"; more than that cannot be, so {seconds_text(left)} are shown"
    return f"{note}: the difference is taken off launch gaps and host time{rest}"
