"""What recording itself costs: said beside every profile, because a budget of a slowed-down step misleads."""

from __future__ import annotations

from dataclasses import replace

from armillary.profiling.profile import Profile
from armillary.units import seconds_text

DISTORTED = 1.15
"""times the plain step from which the recording's own cost is worth a warning"""


def with_overhead(found: Profile, plain_s: float | None) -> Profile:
    """The profile with a note of what a step takes without the profiler."""
    if not plain_s or not found.step_s:
        return found
    times = found.step_s / plain_s
    note = f"a step takes {seconds_text(plain_s)} without the profiler, {seconds_text(found.step_s)} with it"
    if times > DISTORTED:
        note += f": {times:.2f} × as long, so host time and launch gaps are overstated"
    return replace(found, notes=(*found.notes, note))
