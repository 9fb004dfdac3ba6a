"""Requests per second that one replica serves within its objectives: as planned, corrected by what is measured.

Where replicas miss an objective at a lower rate than planned, the capacity is less; where they keep all objectives at a
higher one, it is more. The correction moves slowly, so that one bad minute does not double a fleet.

Several replicas behind a router serve more each than one alone, because one that is free takes the next request. As in
queues with many servers (Halfin and Whitt, 1981), the rate of r replicas that are full needs r + β·√r.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

from armillary.fleet.autoscale.signals import Signals

_DOWN, _UP = 0.97, 1.01
"""factors of the correction per look: a miss counts more than a success"""
_LEAST, _MOST = 0.25, 4.0
MAY_MISS = 0.01
"""share of requests that may miss an objective: the error budget"""
_LEAST_LATE = 3
"""looks of a window that miss an objective before it counts as missed"""
_NEAR = 0.9
"""share of the objective below which a latency is kept"""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Objectives that count, and what a replica is planned to serve."""

    requests_per_s: float
    """of a replica that is alone, within the objectives; by the planner or a load test"""
    pooled_per_s: float | None = None
    """of each of many replicas behind one router, which even out bursts; none: the same"""
    in_flight: float
    """requests at a replica at its rate among many"""
    ttft_s: float | None = None
    itl_s: float | None = None
    usd_per_hour: float = 0.0
    """of one replica"""


def pooled_rate(alone: float, each: float, replicas: int) -> float:
    """Requests per second by each of very many replicas, from the rate of one alone and of each of `replicas`: the one
    at which `Capacity.of_fleet` says the same of both; at most twice the rate of one alone."""
    low, high = max(alone, each), max(alone, each, min(2 * alone, 2 * each))
    for _ in range(40):
        middle = (low + high) / 2
        fleet = Capacity(Limits(requests_per_s=alone, pooled_per_s=middle, in_flight=1.0)).of_fleet(replicas)
        low, high = (middle, high) if fleet < replicas * each else (low, middle)
    return low


class Capacity:
    """The planned capacity times a correction."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.correction = 1.0

    @property
    def requests_per_s(self) -> float:
        """Of each of many replicas."""
        return (self.limits.pooled_per_s or self.limits.requests_per_s) * self.correction

    @property
    def spare(self) -> float:
        """β: r + β·√r replicas serve the rate of r full ones, as bursts of independent requests even out."""
        share = self.limits.requests_per_s / (self.limits.pooled_per_s or self.limits.requests_per_s)
        return max(0.0, 1 - share) / sqrt(share)

    def replicas_for(self, requests_per_s: float, target: float = 1.0) -> float:
        """That serve a rate at a share `target` of their capacity."""
        full = requests_per_s / (self.requests_per_s * target)
        return full + self.spare * sqrt(full)

    def of_fleet(self, replicas: int) -> float:
        """Requests per second that so many serve: `replicas_for`, inverted."""
        root = (sqrt(self.spare**2 + 4 * replicas) - self.spare) / 2
        return root * root * self.requests_per_s

    @property
    def in_flight(self) -> float:
        return max(1.0, self.limits.in_flight * self.correction)

    def latency_ratio(self, signals: Signals) -> float:
        """The worst measured latency over its objective; 0 where none is known."""
        limits = ((signals.ttft_p99_s, self.limits.ttft_s), (signals.itl_p99_s, self.limits.itl_s))
        return max((value / limit for value, limit in limits if value is not None and limit), default=0.0)

    def missed(self, window: Sequence[Signals]) -> float:
        """How far the objectives were missed in a window: the median ratio of the looks that missed one; 0 where these
        are so few that 99 % of the requests may have kept them."""
        misses = sorted(ratio for ratio in map(self.latency_ratio, window) if ratio > 1.0)
        if len(misses) < _LEAST_LATE or (self.missed_share(window) or 0.0) <= MAY_MISS:
            return 0.0
        return misses[len(misses) // 2]

    def missed_share(self, window: Sequence[Signals]) -> float | None:
        """Share of the requests of a window that missed an objective; None where no latency is known. The p99 of a look
        at n requests is beyond an objective that a request misses with probability q in a share 1 − (1 − q)ⁿ of looks:
        the fewer requests, the more often it is one of them that was unlucky."""
        ratios = [ratio for ratio in map(self.latency_ratio, window) if ratio]
        if not ratios:
            return None
        misses = sum(ratio > 1.0 for ratio in ratios)
        seconds = max(1e-9, window[-1].now - window[0].now) / max(1, len(window) - 1)
        requests = max(1.0, sum(look.arrived_per_s for look in window) / len(window) * seconds)
        return 1.0 - math.pow(1.0 - misses / len(ratios), 1 / requests)

    def learn(self, window: Sequence[Signals], *, unchanged: bool) -> None:
        """Correct by the looks of a time in which the fleet has not changed its size: up where that is a while."""
        if not window or not window[-1].ready or not self.latency_ratio(window[-1]):
            return
        used = sum(look.arrived_per_s for look in window) / len(window) / self.of_fleet(window[-1].ready)
        if self.missed(window):
            if used < 1.0:
                self.correction = max(_LEAST, self.correction * max(_DOWN, used))
        elif self.correction < 1.0:
            self.correction = min(1.0, self.correction * _UP)
        elif unchanged and used > 1.0 and self.latency_ratio(window[-1]) < _NEAR:
            self.correction = min(_MOST, self.correction * min(_UP, used))
