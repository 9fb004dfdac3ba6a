"""Whether a simulated request met every objective."""

from __future__ import annotations

from array import array

from armillary.planning.simulation.fleet_run import FleetRun
from armillary.planning.simulation.simulated_replica import Served
from armillary.spec.tables.traffic import Objective
from armillary.stats import percentile


def latencies(served: Served) -> tuple[float, float, float]:
    """TTFT, time per output token, end to end."""
    ttft, e2e = served.first_s - served.arrived_s, served.end_s - served.arrived_s
    return ttft, (e2e - ttft) / (served.tokens_out - 1) if served.tokens_out > 1 else 0.0, e2e


def met(served: Served, run: FleetRun, objective: Objective) -> bool:
    """Whether a request met every objective; its ITL is the 99th percentile of its own gaps."""
    values = dict(zip(("ttft_p99_s", "tpot_p99_s", "e2e_p99_s"), latencies(served), strict=True))
    for name, value in values.items():
        limit = getattr(objective, name)
        if limit is not None and value > limit:
            return False
    if objective.itl_p99_s is None:
        return True
    return percentile(own_gaps(served, run), 99) <= objective.itl_p99_s


def own_gaps(served: Served, run: FleetRun) -> array[float]:
    """The gaps between the tokens of one request."""
    gaps = run.lives[int(served.replica.rpartition(" ")[2])].engine.gaps
    return gaps[served.first_gap : served.end_gap]
