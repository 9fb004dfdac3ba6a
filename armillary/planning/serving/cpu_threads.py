"""Compute threads of an engine on a CPU, and the measured ceilings of that many threads.

Threads synchronise at every operator and wait for the slowest. Where the engine uses all cores, that is the thread
whose core the HTTP server or a client uses: a small model is then slower with two threads than with one.
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
"""kinds of ceilings that depend on threads; memory is shared by all"""


@dataclass(frozen=True, kw_only=True)
class Threads:
    """A number of threads and why."""

    count: int
    cores: int
    reason: str = ""
    """one line; empty where the number was set"""


def engine_threads(replica: Replica, cores: int, context: int) -> Threads:
    """All cores; one fewer where torch calls take longer than arithmetic in a decode step with one row, since another
    thread speeds up only the arithmetic."""
    step = replica.decode(1, context)
    rest_s = step.total_s - step.host_s
    if cores < 2 or step.host_s <= rest_s:
        return Threads(count=cores, cores=cores, reason=f"{cores}: one per core")
    times = f"{seconds_text(step.host_s)} of torch calls to {seconds_text(rest_s)} of arithmetic"
    reason = f"{cores - 1} of {cores} cores, the last one is for the server: a decode step is {times}"
    return Threads(count=cores - 1, cores=cores, reason=reason)


def peaks_of_threads(home: Home, all_cores: Peaks | None, count: int, cores: int) -> Peaks | None:
    """Ceilings that `count` threads reach: measured, else in proportion to what all cores reach."""
    if all_cores is None or count >= cores:
        return all_cores
    from armillary.machine.device_name import device_name
    from armillary.store.peaks import load_peaks

    own = load_peaks(home, device_name("cpu", threads=count))
    known = own.points if own is not None else {}
    points = {kind: known.get(kind) or shared_points(all_cores, kind, count / cores) for kind in KINDS}
    return replace(all_cores, points={**all_cores.points, **{kind: rows for kind, rows in points.items() if rows}})
