"""How many threads a server's engine computes with on a CPU, and the ceilings of so many.

Threads that meet at every operator wait for the slowest of them. Where the engine has all cores, that is the one whose
core the HTTP server or a client just uses: a small model then answers more slowly with two threads than with one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from armillary.planning.device_model.measured_peaks import shared_points
from armillary.planning.serving.replica import Replica
from armillary.store.home import Home
from armillary.units import seconds_text

if TYPE_CHECKING:
    from armillary.store.peaks import Peaks

KINDS = ("gemm", "attention", "passes")
"""of ceilings that go with threads; memory is shared by all"""


@dataclass(frozen=True, kw_only=True)
class Threads:
    """A number of threads and why."""

    count: int
    """threads that compute"""
    cores: int
    """cores there are"""
    reason: str = ""
    """in a line; empty where it was asked for"""


def engine_threads(replica: Replica, cores: int, context: int) -> Threads:
    """All cores; one fewer where a decode step of one row takes longer in torch calls than in arithmetic, which is all
    that another thread would speed up."""
    step = replica.decode(1, context)
    rest_s = step.total_s - step.host_s
    if cores < 2 or step.host_s <= rest_s:
        return Threads(count=cores, cores=cores, reason=f"{cores}: one for each core")
    times = f"{seconds_text(step.host_s)} of torch calls to {seconds_text(rest_s)} of arithmetic"
    reason = f"{cores - 1} of {cores} cores, the last one is the server's: a decode step is {times}"
    return Threads(count=cores - 1, cores=cores, reason=reason)


def peaks_of_threads(home: Home, whole: Peaks | None, count: int, cores: int) -> Peaks | None:
    """Ceilings that `count` threads reach, as measured with so many, else in proportion to what all cores reach."""
    if whole is None or count >= cores:
        return whole
    from armillary.machine.device_name import device_name
    from armillary.store.peaks import load_peaks

    own = load_peaks(home, device_name("cpu", threads=count))
    known = own.points if own is not None else {}
    points = {kind: known.get(kind) or shared_points(whole, kind, count / cores) for kind in KINDS}
    return replace(whole, points={**whole.points, **{kind: found for kind, found in points.items() if found}})
