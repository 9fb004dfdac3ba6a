"""Memory over time from the allocator's own events: the peak, its time, and what was allocated then."""

from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from armillary.profiling.analysis.op_table import module_of
from armillary.profiling.analysis.roofline_attribution import Attribution
from armillary.profiling.analysis.step_budget import Window
from armillary.profiling.profile import MemoryTimeline
from armillary.profiling.trace.trace import Array

_POINTS = 2000
"""of the curve: more than a page can show"""
BEFORE = "before"
"""category of what was allocated before the window began: weights, optimiser states, caches"""


def memory_timeline(attribution: Attribution, window: Window, device: int) -> MemoryTimeline | None:
    """Of one device (-1: the host), or None where memory was not recorded."""
    memory = attribution.trace.memory
    if memory is None:
        return None
    inside = np.flatnonzero((memory.device == device) & (memory.start >= window.low) & (memory.start <= window.high))
    if not len(inside):
        return None
    total = memory.total[inside].astype(float)
    peak = int(total.argmax())
    categories, modules = _alive(attribution, inside[: peak + 1])
    categories[BEFORE] = max(0.0, total[peak] - sum(categories.values()))
    shown = _thin(total)
    return MemoryTimeline(
        times_s=tuple((memory.start[inside][shown] - window.low).tolist()),
        bytes=tuple(total[shown].tolist()),
        peak_bytes=float(total[peak]),
        peak_s=float(memory.start[inside[peak]] - window.low),
        by_category=_largest(categories),
        by_module=_largest(modules),
    )


def _largest(sizes: Mapping[str, float], most: int = 50) -> dict[str, float]:
    ranked = sorted(sizes.items(), key=lambda item: -item[1])
    return {name: size for name, size in ranked[:most] if size > 0}


def _alive(attribution: Attribution, events: Array) -> tuple[dict[str, float], dict[str, float]]:
    """Live blocks, by category and by module."""
    memory = attribution.trace.memory
    assert memory is not None
    alive: dict[int, int] = {}
    for event, change, address in zip(
        events.tolist(), memory.change[events].tolist(), memory.address[events].tolist(), strict=True
    ):
        if change > 0:
            alive[address] = event
        else:
            alive.pop(address, None)
    categories: defaultdict[str, float] = defaultdict(float)
    modules: defaultdict[str, float] = defaultdict(float)
    for event in alive.values():
        size = float(memory.change[event])
        inner = attribution.host.at(int(memory.thread[event]), float(memory.start[event]))
        categories[_category(attribution, inner)] += size
        modules[(module_of(attribution, inner) if inner >= 0 else "") or "outside modules"] += size
    return categories, modules


def _category(attribution: Attribution, event: int) -> str:
    """By the allocating code: the optimiser, autograd's backward, or else the forward."""
    names = [attribution.trace.name_of(around) for around in attribution.host.ancestors(event)]
    if any(name.startswith("Optimizer.") or "optim/" in name for name in names):
        return "optimizer"
    if any("autograd::engine" in name or "Backward" in name for name in names):
        return "gradients"
    return "activations" if names else "other"


def _thin(total: Array) -> Array:
    """At most _POINTS points, the highest of each bin, so that peaks survive."""
    if len(total) <= _POINTS:
        return np.arange(len(total))
    edges = np.linspace(0, len(total), _POINTS + 1).astype(int)[:-1]
    return np.array(
        [
            low + int(total[low:high].argmax())
            for low, high in zip(edges, [*edges[1:], len(total)], strict=True)
            if high > low
        ]
    )
