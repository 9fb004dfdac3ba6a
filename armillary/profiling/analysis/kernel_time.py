"""Kernel time split into the time that the roofline needs and the rest.

Time whose least time is not known (no shapes in the trace, no ceiling of the device) is unjudged: it counts as
neither useful nor wasted.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from armillary.profiling.analysis.roofline_attribution import Attribution
from armillary.profiling.profile import Row
from armillary.profiling.trace.trace import Array

KERNEL_PARTS = ("useful", "inefficiency", "unjudged")
"""parts of the budget in which the device computes"""
CHEAPEST_CALLS = 0.25
"""share of the operator calls, the cheapest, whose cost is taken for the fixed cost of any call"""
LONG_STALL_S = 1e-3
"""a stretch of Python longer than what comes between two operators"""


@dataclass(frozen=True, kw_only=True)
class KernelTime:
    """The time in which work was done: what the roofline needs, the rest of what could be judged, and what could
    not."""

    useful_s: float = 0.0
    inefficient_s: float = 0.0
    unjudged_s: float = 0.0

    @property
    def seconds(self) -> float:
        return self.useful_s + self.inefficient_s + self.unjudged_s

    @property
    def judged_share(self) -> float:
        """Share of the kernel time whose work is known, 0 to 1."""
        return 1 - self.unjudged_s / self.seconds if self.seconds else 1.0

    @property
    def parts(self) -> Mapping[str, float]:
        return dict(zip(KERNEL_PARTS, (self.useful_s, self.inefficient_s, self.unjudged_s), strict=True))


NO_TIME = KernelTime()


def split_kernel_time(
    attribution: Attribution, events: Array, seconds: Array, covered: Callable[[Array], float]
) -> KernelTime:
    """`seconds` is each event's time; `covered` gives the time that some of them cover, overlap counted once.

    Concurrent kernels share the time they cover: their roofline times together are useful, up to that time, and time is
    unjudged only where no judged kernel runs.
    """
    if float(seconds.sum()) <= 0:
        return NO_TIME
    roofline = attribution.roofline_s[events]
    length = attribution.trace.seconds[events]
    inside = np.where(length > 0, np.minimum(1.0, seconds / np.where(length > 0, length, 1.0)), 0.0)
    known = ~np.isnan(roofline)
    judged_s, all_s = covered(known), covered(np.ones(len(known), dtype=bool))
    useful = min(judged_s, float(np.minimum(np.nan_to_num(roofline) * inside, seconds)[known].sum()))
    return KernelTime(useful_s=useful, inefficient_s=judged_s - useful, unjudged_s=all_s - judged_s)


def launch_bound_s(rows: Sequence[Row]) -> float:
    """Seconds that follow the number of kernels rather than their work: on a GPU, kernels too short for any roofline;
    on a CPU, the fixed cost of a call for every operator."""
    if any(row.kind == "kernel" for row in rows):
        return sum(row.seconds for row in rows if row.bound == "overhead")
    each = call_s(rows)
    return sum(min(row.seconds, row.calls * each) for row in rows)


def call_s(rows: Sequence[Row]) -> float:
    """Seconds that any operator call costs a CPU, whatever its work: the cost of the cheapest operators."""
    before, total = 0, sum(row.calls for row in rows)
    for each, calls in sorted((row.seconds / row.calls, row.calls) for row in rows):
        before += calls
        if before >= CHEAPEST_CALLS * total:
            return each
    return 0.0
