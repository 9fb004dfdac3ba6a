"""Requests per second that one replica serves within its objectives: as planned, corrected by what is measured.

Where replicas miss an objective at a lower rate than planned, the capacity is less; where they keep all objectives at a
higher one, it is more. The correction moves slowly, so that one bad minute does not double a fleet.
"""

from __future__ import annotations

from dataclasses import dataclass

from armillary.fleet.autoscale.signals import Signals

_DOWN, _UP = 0.9, 1.02
"""factors of the correction per look: a miss counts more than a success"""
_LEAST, _MOST = 0.25, 4.0
_NEAR = 0.9
"""share of the objective below which a latency is kept"""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Objectives that count, and what a replica is planned to serve."""

    requests_per_s: float
    """of one replica, within the objectives; by the planner or a load test"""
    in_flight: float
    """requests at one replica at that rate"""
    ttft_s: float | None = None
    itl_s: float | None = None
    usd_per_hour: float = 0.0
    """of one replica"""


class Capacity:
    """The planned capacity times a correction."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.correction = 1.0

    @property
    def requests_per_s(self) -> float:
        return self.limits.requests_per_s * self.correction

    @property
    def in_flight(self) -> float:
        return max(1.0, self.limits.in_flight * self.correction)

    def latency_ratio(self, signals: Signals) -> float:
        """The worst measured latency over its objective; 0 where none is known."""
        limits = ((signals.ttft_p99_s, self.limits.ttft_s), (signals.itl_p99_s, self.limits.itl_s))
        return max((value / limit for value, limit in limits if value is not None and limit), default=0.0)

    def learn(self, signals: Signals, *, stable: bool) -> None:
        """Correct by one look at a fleet that has not just changed its size (`stable`)."""
        ratio = self.latency_ratio(signals)
        if not stable or not signals.ready or not ratio:
            return
        rate = signals.arrived_per_s / signals.ready
        if ratio > 1.0 and rate < self.requests_per_s:
            self.correction = max(_LEAST, self.correction * _DOWN, rate / self.limits.requests_per_s)
        elif ratio < _NEAR and rate > self.requests_per_s:
            self.correction = min(_MOST, self.correction * _UP, rate / self.limits.requests_per_s)
