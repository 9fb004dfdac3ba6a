"""What recording itself costs, taken off the budget: a budget of a slowed-down step misleads.

A profiler slows the host, not a GPU's kernels: a step that was also timed without it tells by how much. The difference
is taken off launch gaps and the host's time, in proportion, so that the budget is that of the plain step. Where the
host is the device, every operator is slowed too: then the recorded step is shown, and a note says by how much.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from armillary.profiling.analysis.step_budget import Budget
from armillary.units import seconds_text

WORTH = 1.05
"""times the plain step from which anything is taken off: less is noise"""
_MOST = 0.95
"""share of the host's time that may go: some of it is always real"""
_SLOWED = ("launch_gap", "host")


def without_recording(spent: Budget, plain_s: float | None) -> Budget:
    """The budget of the step as it runs without the profiler, where that time is known."""
    steps, wall_s = spent.window.steps, spent.window.seconds
    if not plain_s or spent.device < 0 or wall_s <= WORTH * plain_s * steps:
        return spent
    slowed = sum(spent.parts[part] for part in _SLOWED)
    off = min(wall_s - plain_s * steps, _MOST * slowed)
    kept = 1 - off / slowed if slowed else 1.0
    return replace(spent, overhead_s=off, kept=dict.fromkeys(_SLOWED, kept), parts=_scaled(spent.parts, kept))


def _scaled(parts: Mapping[str, float], kept: float) -> dict[str, float]:
    return {part: seconds * (kept if part in _SLOWED else 1.0) for part, seconds in parts.items()}


def overhead_note(spent: Budget, plain_s: float | None) -> str:
    """What a step takes without the profiler, and what was made of it; '' where that is not known."""
    step_s = spent.window.seconds / spent.window.steps
    if not plain_s:
        return ""
    note = f"a step takes {seconds_text(plain_s)} without the profiler, {seconds_text(step_s)} with it"
    if not spent.overhead_s:
        slower = step_s / plain_s
        return f"{note}: {slower:.2f} × as long" if slower > WORTH else note
    left = spent.wall_s / spent.window.steps
    rest = "" if left <= WORTH * plain_s else f"; more than that cannot be, so {seconds_text(left)} are shown"
    return f"{note}: the difference is taken off launch gaps and host time{rest}"
