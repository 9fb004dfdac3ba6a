"""Capacity curves: how replicas serve at every rate, from nearly idle to full, by full simulations of a few of them.

A few replicas behind the real router stand for one that has many equal neighbours: with more of them, a router finds an
idle one hardly more often. Between the simulated rates, distributions are interpolated quantile by quantile.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import partial
from multiprocessing import get_context
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np

from armillary.errors import BadInput
from armillary.machine.cores import usable_cores
from armillary.planning.simulation.fleet_run import FleetRun
from armillary.planning.simulation.replayed_requests import drawn
from armillary.planning.simulation.request_slo import latencies, met
from armillary.planning.simulation.simulated_fleet import SimulatedFleet
from armillary.planning.simulation.trace_arrivals import has_shared_prefixes

if TYPE_CHECKING:
    from armillary.planning.device_model.vectorised_layouts import Array
    from armillary.planning.simulation.fleet_case import FleetCase

REPLICAS = 8
"""that are simulated at each rate"""
REQUESTS = 200
"""of each of them"""
WARM = 0.2
"""share of the requests at the begin that is left out, while replicas fill"""
SHARES = (0.05, 0.2, 0.35, 0.5, 0.6, 0.7, 0.78, 0.85, 0.9, 0.95, 1.0)
"""rates, as shares of the highest"""
QUANTILES = np.linspace(0.0025, 0.9975, 200)
"""of every distribution: the middles of 200 equal parts"""


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """Replicas at one rate. Latencies are quantiles over requests, gaps over tokens; the rest is a mean per replica."""

    requests_per_s: float
    """that arrive at one replica"""
    ttft_s: Array
    tpot_s: Array
    e2e_s: Array
    queue_s: Array
    gap_s: Array
    met: float
    """share of requests that meet every objective"""
    in_flight: float
    waiting: float
    kv_used: float
    busy: float

    def towards(self, other: CurvePoint, share: float) -> CurvePoint:
        """So far on the way to another."""
        names = [field.name for field in fields(self)]
        values = {name: getattr(self, name) * (1 - share) + getattr(other, name) * share for name in names}
        return CurvePoint(**values)


@dataclass(frozen=True, kw_only=True)
class CapacityCurve:
    """Points by rate; the last one is the highest rate that replicas keep up with."""

    points: Sequence[CurvePoint]

    @property
    def most_per_s(self) -> float:
        return self.points[-1].requests_per_s

    def at(self, requests_per_s: float) -> CurvePoint:
        """Interpolated; beyond the ends, the ends."""
        rates = [point.requests_per_s for point in self.points]
        i = bisect_left(rates, requests_per_s)
        if i == 0 or i == len(rates):
            return self.points[min(i, len(rates) - 1)]
        low, high = self.points[i - 1], self.points[i]
        return low.towards(high, (requests_per_s - rates[i - 1]) / (rates[i] - rates[i - 1]))


def capacity_curve(case: FleetCase, *, requests: int = REQUESTS, workers: int | None = None) -> CapacityCurve:
    """The curve of a case's replicas with the lengths of its requests, `requests` of each replica at every rate, in
    parallel processes."""
    if has_shared_prefixes(case.arrivals):
        raise BadInput("curves do not know which replica has a prefix; set fleet.simulate=each for shared prefixes")
    bare = replace(case, arrivals=case.arrivals[:: max(1, len(case.arrivals) // 4000)], fleet=_steady(case))
    most = highest_rate(bare, requests)
    count = min(len(SHARES), usable_cores()) if workers is None else workers
    ask = partial(_point, bare, most, requests)
    if count < 2:
        return CapacityCurve(points=[ask(share) for share in SHARES])
    with ProcessPoolExecutor(count, mp_context=get_context("spawn")) as pool:
        return CapacityCurve(points=list(pool.map(ask, SHARES[::-1]))[::-1])


def _steady(case: FleetCase) -> Any:
    return replace(case.fleet, replicas=REPLICAS, failures_per_hour=0.0)


def highest_rate(case: FleetCase, requests: int = REQUESTS) -> float:
    """Requests per second that one replica finishes while others wait: between a quarter and three quarters of a
    crowd that arrives at once."""
    run = _simulated(case, 1e6, requests, replicas=1)
    ends = sorted(served.end_s for served in run.served)
    low, high = len(ends) // 4, 3 * len(ends) // 4
    return (high - low) / max(1e-9, ends[high] - ends[low])


def _simulated(case: FleetCase, rate: float, count: int, *, replicas: int) -> FleetRun:
    """A Poisson stream at so many requests per second and replica, with lengths drawn from the case's requests."""
    rate_of_all = rate * replicas
    traffic = replace(case.traffic, requests_per_s=rate_of_all, shared_prefix=0)
    lengths = Random(f"curve {rate}").choices(case.arrivals, k=count * replicas)
    arrivals = [
        replace(at, tokens_in=lengths_of.tokens_in, tokens_out=lengths_of.tokens_out, limit=lengths_of.limit)
        for at, lengths_of in zip(drawn(traffic, count * replicas), lengths, strict=True)
    ]
    return SimulatedFleet(arrivals, case.system, case.cost, replace(case.fleet, replicas=replicas)).run()


def _point(case: FleetCase, most: float, requests: int, share: float) -> CurvePoint:
    """The steady part of a simulation: without its begin, and without the end in which replicas empty."""
    rate = most * share
    run = _simulated(case, rate, requests, replicas=REPLICAS)
    begin, end = WARM * requests / rate, requests / rate
    served = [each for each in run.served if begin <= each.arrived_s < end]
    samples = [look for look in run.timeline if begin <= look.now < end] or run.timeline[-1:]
    times = [latencies(each) for each in served]
    columns = {
        "ttft_s": [ttft for ttft, _, _ in times],
        "tpot_s": [tpot for (_, tpot, _), each in zip(times, served, strict=True) if each.tokens_out > 1],
        "e2e_s": [e2e for _, _, e2e in times],
        "queue_s": [each.started_s - each.arrived_s for each in served],
    }
    busy = sum(life.engine.busy_s for life in run.lives) / max(1e-9, run.replica_s)
    return CurvePoint(
        requests_per_s=rate,
        **{name: np.quantile(values or [0.0], QUANTILES) for name, values in columns.items()},
        gap_s=_gap_quantiles(run),
        met=sum(met(each, run, case.objective) for each in served) / max(1, len(served)),
        in_flight=float(np.mean([look.in_flight for look in samples])) / REPLICAS,
        waiting=float(np.mean([look.waiting for look in samples])) / REPLICAS,
        kv_used=float(np.mean([look.kv_used for look in samples])),
        busy=min(1.0, busy),
    )


def _gap_quantiles(run: FleetRun) -> Array:
    engines = [life.engine for life in run.lives if life.engine.gaps]
    if not engines:
        return np.zeros(len(QUANTILES))
    gaps = np.concatenate([np.frombuffer(engine.gaps) for engine in engines])
    weights = np.concatenate([np.frombuffer(engine.gap_weights, dtype=np.uint32) for engine in engines])
    order = np.argsort(gaps)
    below = np.cumsum(weights[order], dtype=np.float64)
    return gaps[order][np.searchsorted(below, below[-1] * QUANTILES)]
