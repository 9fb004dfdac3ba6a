"""A large fleet computed from a capacity curve: replicas are numbers, requests are rates, the autoscaler is real.

Every second has the rate of its surroundings; requests beyond what replicas keep up with wait, and are served as soon
as there is capacity. The distribution of a latency is the mixture of the curve's distributions over all requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from armillary.fleet.autoscale.policy import Autoscaler, Decision
from armillary.fleet.autoscale.signals import Signals
from armillary.planning.simulation.capacity_curve import QUANTILES, CapacityCurve, CurvePoint
from armillary.planning.simulation.fleet_run import Look
from armillary.planning.simulation.simulated_fleet import START_S

if TYPE_CHECKING:
    from armillary.planning.device_model.vectorised_layouts import Array
    from armillary.planning.simulation.fleet_case import FleetCase

SECOND = 1.0
LEAST_WINDOW_S, WINDOW_REQUESTS = 10.0, 600
"""rates are means over this time at least, and over so many requests: random clusters are in the curve already"""


@dataclass(frozen=True)
class Part:
    """Requests that were served alike."""

    requests: float
    point: CurvePoint
    wait_s: float
    """for capacity, before what the curve knows"""


@dataclass(kw_only=True)
class CurveRun:
    """What happened; the counts are of requests."""

    parts: list[Part] = field(default_factory=list, repr=False)
    timeline: list[Look] = field(default_factory=list, repr=False)
    decisions: list[tuple[Signals, Decision]] = field(default_factory=list, repr=False)
    broken: float = 0.0
    unserved: float = 0.0
    replica_s: float = 0.0
    end_s: float = 0.0
    started: int = 0
    """replicas, those of the begin included"""


class CurveFleet:
    """One run; make a new one for the next."""

    def __init__(
        self, case: FleetCase, curve: CapacityCurve, *, autoscaler: Autoscaler | None = None, seed: int = 0
    ) -> None:
        self._case, self._curve, self._autoscaler = case, curve, autoscaler
        self._rng = np.random.default_rng(seed)
        self._start_s = START_S if case.fleet.start_s is None else case.fleet.start_s
        self._ready = case.fleet.replicas
        self._starting: list[float] = []  # when each is ready
        self._replaced: list[float] = []  # when a failed one's successor begins to start
        self._backlog = 0.0
        self._run = CurveRun(started=case.fleet.replicas)

    def run(self) -> CurveRun:
        """Until every request is served, or given up."""
        times = np.array([arrival.at_s for arrival in self._case.arrivals])
        counts, rates = demand(times, self._case.requests_per_arrival)
        interval_s = self._autoscaler.settings.interval_s if self._autoscaler is not None else float("inf")
        looked_at, arrived, second = 0.0, 0.0, 0
        while second < len(counts) or (self._backlog > 1e-6 and second < 100 * len(counts)):
            now = second * SECOND
            self._change_replicas(now)
            count, rate = (counts[second], rates[second]) if second < len(counts) else (0.0, 0.0)
            point, wait_s = self._serve(count, rate)
            arrived += count
            self._look(now, point)
            if now - looked_at >= interval_s:
                self._decide(now, arrived / (now - looked_at), point, wait_s)
                looked_at, arrived = now, 0.0
            self._run.replica_s += SECOND * (self._ready + len(self._starting))
            second += 1
        self._run.end_s = second * SECOND
        return self._run

    def _serve(self, count: float, rate: float) -> tuple[CurvePoint, float]:
        """The requests of a second: their point of the curve, and their wait for capacity."""
        curve, ready, run = self._curve, self._ready, self._run
        most = ready * curve.most_per_s
        if not ready:
            self._backlog += count
            given_up = max(0.0, self._backlog - rate * self._case.fleet.max_wait_s) if rate else 0.0
            self._backlog -= given_up
            run.unserved += given_up
            return curve.points[0], 0.0
        wanted = rate + self._backlog / SECOND
        point = curve.at(min(wanted, most) / ready)
        self._backlog = max(0.0, self._backlog + (rate - most) * SECOND)
        wait_s = self._backlog / most
        if count:
            run.parts.append(Part(count, point, wait_s))
        return point, wait_s

    def _change_replicas(self, now: float) -> None:
        """Starts that are over, failures, and their replacement."""
        done = sum(at <= now for at in self._starting)
        if done and self._autoscaler is not None:
            self._autoscaler.started(self._start_s)
        self._ready, self._starting = self._ready + done, [at for at in self._starting if at > now]
        begun = sum(at <= now for at in self._replaced)
        self._replaced = [at for at in self._replaced if at > now]
        self._start(begun, now)
        per_s = self._case.fleet.failures_per_hour / 3600
        failed = min(self._ready, int(self._rng.poisson(per_s * self._ready * SECOND))) if per_s else 0
        if failed:
            in_flight = self._curve.at(self._run.parts[-1].point.requests_per_s if self._run.parts else 0.0).in_flight
            self._ready -= failed
            self._run.broken += failed * in_flight
            self._replaced += [now + self._case.fleet.detect_s] * failed

    def _start(self, count: int, now: float) -> None:
        self._starting += [now + self._start_s] * count
        self._run.started += count

    def _look(self, now: float, point: CurvePoint) -> None:
        ready, backlog = self._ready, self._backlog
        self._run.timeline.append(
            Look(
                now=now,
                ready=ready,
                starting=len(self._starting),
                in_flight=round(ready * point.in_flight + backlog),
                waiting=round(ready * point.waiting + backlog),
                kv_used=point.kv_used if ready else 0.0,
            )
        )

    def _decide(self, now: float, arrived_per_s: float, point: CurvePoint, wait_s: float) -> None:
        assert self._autoscaler is not None
        look, p99 = self._run.timeline[-1], int(0.99 * len(QUANTILES))
        signals = Signals(
            now=now,
            ready=look.ready,
            starting=look.starting,
            arrived_per_s=arrived_per_s,
            in_flight=look.in_flight,
            waiting=look.waiting,
            kv_used=look.kv_used,
            ttft_p99_s=float(point.ttft_s[p99]) + wait_s if arrived_per_s else None,
            itl_p99_s=float(point.gap_s[p99]) if arrived_per_s else None,
            gpu_used=point.busy,
        )
        decision = self._autoscaler.decide(signals)
        self._run.decisions.append((signals, decision))
        change = decision.replicas - look.ready - look.starting
        if change > 0:
            self._start(change, now)
        elif change < 0:
            stopped = min(-change, len(self._starting))  # those that are starting go first
            self._starting = self._starting[: len(self._starting) - stopped]
            drained = -change - stopped
            self._ready -= drained
            self._run.replica_s += drained * float(np.mean(point.e2e_s))  # they finish their requests


def demand(times: Array, weight: float) -> tuple[Array, Array]:
    """(requests, mean rate around it) of every second; each time stands for `weight` requests."""
    counts = np.bincount((times / SECOND).astype(int)).astype(float) * weight
    mean = counts.sum() / weight / max(1, len(counts))
    window = round(max(LEAST_WINDOW_S, WINDOW_REQUESTS / max(mean, 1e-9)) / SECOND)
    window = max(1, min(window, len(counts)))
    sums = np.concatenate([[0.0], np.cumsum(counts)])
    seconds = np.arange(len(counts))
    low, high = np.maximum(0, seconds - window // 2), np.minimum(len(counts), seconds + window - window // 2)
    return counts, (sums[high] - sums[low]) / (high - low) / SECOND


def mixture(parts: Sequence[Part], name: str, percents: Sequence[float], *, waits: bool = False) -> list[float]:
    """Percentiles of a latency over all requests."""
    if not parts:
        return [0.0 for _ in percents]
    values = np.concatenate([getattr(part.point, name) + (part.wait_s if waits else 0.0) for part in parts])
    weights: np.ndarray = np.repeat([part.requests for part in parts], len(QUANTILES))
    order = np.argsort(values)
    below = np.cumsum(weights[order])
    at = np.minimum(np.searchsorted(below, below[-1] * np.array(percents) / 100), len(order) - 1)
    return [float(value) for value in values[order][at]]
