"""Launching: the share of a step that follows the number of operations rather than the work in them.

On a GPU it is seen: the device stands idle until a launch comes, or runs kernels too short for any roof. On a processor
every operator pays for its call, and shares of a recorded step swell with whatever else the machine does meanwhile; so
operators are counted, and held against the time that the main thread really ran.
"""

from __future__ import annotations

from armillary.diagnosis.reading import Reading
from armillary.planning.overhead import CALL_S
from armillary.spec.plan import Plan

MOST = 0.95
"""share that may be launching: some of it is always work"""


def launching(reading: Reading, plan: Plan | None) -> float | None:
    """The share, of a step without its waiting; None where no step was recorded."""
    gaps = reading.get("launch_gap_fraction")
    if gaps is None:
        return None
    seen = gaps + (reading.get("short_kernels_fraction") or 0.0)
    calls, ran = reading.get("kernels"), reading.get("host_cpu_s")
    if plan is None or plan.cluster.chip.kind != "cpu" or not calls or not ran:
        return min(MOST, seen)
    return min(MOST, calls * CALL_S / ran)
