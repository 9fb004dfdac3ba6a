"""Services that are sized wrongly: the real autoscaler decides for a simulated fleet, and leaves its decisions.jsonl.

The fleet is a queue before replicas of one capacity that take their time to start; arrivals are drawn. What is wrong is
a limit of the policy, the size of a replica, or the time of a start. Nothing here knows the rules that judge the log.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import exp, pi, sin
from pathlib import Path
from random import Random

from armillary.fleet.autoscale.decision_log import AutoscalerStart, Logged, append
from armillary.fleet.autoscale.policy import Autoscaler
from armillary.fleet.autoscale.replica_capacity import Limits
from armillary.fleet.autoscale.signals import Signals
from armillary.spec.tables.fleet import Autoscale
from armillary.store.home import Home
from tests.planted.problem import Problem, Wish

HOURS, LATENCY_S = 1.2, 2.0
_EVERY_S = 5.0


@dataclass(kw_only=True)
class Fleet:
    """Replicas that serve `per_s` requests each and take `start_s` to start."""

    per_s: float
    start_s: float
    ready: int = 1
    starting: list[float] = field(default_factory=list)
    queue: float = 0.0

    def pass_time(self, now: float, arrived: int) -> tuple[float, float]:
        """(requests served per second, requests waiting) of the next interval."""
        up = [at for at in self.starting if at <= now]
        self.starting = [at for at in self.starting if at > now]
        self.ready += len(up)
        served = min(self.queue + arrived, self.ready * self.per_s * _EVERY_S)
        self.queue += arrived - served
        return served / _EVERY_S, self.queue

    def resize(self, now: float, count: int) -> None:
        """Start or stop, those that still start first."""
        missing = count - self.ready - len(self.starting)
        self.starting += [now + self.start_s] * max(0, missing)
        for _ in range(max(0, -missing)):
            if self.starting:
                self.starting.pop()
            else:
                self.ready -= 1


def write_decisions(path: Path, wish: Wish, settings: Autoscale, fleet: Fleet, per_s: Callable[[float], float]) -> Path:
    """The log of some hours."""
    dice = Random(wish.seed)
    limits = Limits(requests_per_s=fleet.per_s, in_flight=fleet.per_s * LATENCY_S, usd_per_hour=4.0)
    scaler = Autoscaler(settings, limits)
    path.parent.mkdir(parents=True, exist_ok=True)
    append(path, AutoscalerStart(settings=settings, limits=limits))
    now, known = 0.0, fleet.ready
    while now < HOURS * 3600:
        arrived = _poisson(dice, per_s(now) * _EVERY_S)
        served, waiting = fleet.pass_time(now, arrived)
        signals = Signals(
            now=now,
            ready=fleet.ready,
            starting=len(fleet.starting),
            arrived_per_s=arrived / _EVERY_S,
            in_flight=round(served * LATENCY_S + waiting),
            waiting=round(waiting),
            kv_used=min(1.0, 0.7 * served / max(1e-9, fleet.ready * fleet.per_s)),
        )
        decision = scaler.decide(signals)
        started = fleet.start_s if fleet.ready > known else None
        if started is not None:
            scaler.started(started)
        append(path, Logged(signals=signals, decision=decision, started_s=started))
        fleet.resize(now, decision.replicas)
        known, now = fleet.ready, now + _EVERY_S
    return path


def _poisson(dice: Random, mean: float) -> int:
    """Knuth's product of uniforms, in parts that exp can take."""
    count = 0
    while mean > 0:
        part, mean = min(mean, 30.0), mean - 30.0
        limit, product = exp(-part), dice.random()
        while product > limit:
            count, product = count + 1, product * dice.random()
    return count


def day(mean: float, swing: float = 0.5) -> Callable[[float], float]:
    """A wave over an hour."""
    return lambda now: mean * (1 + swing * sin(2 * pi * now / 3600))


def _path(home: Home, name: str, wish: Wish) -> Path:
    path = home.work / f"{name}-{wish.seed}-{wish.severity:g}.decisions.jsonl"
    path.unlink(missing_ok=True)
    return path


def idle(wish: Wish, home: Home) -> Path:
    """Far more replicas than the traffic needs are always kept."""
    least = round(4 + 3 * wish.severity)
    settings = Autoscale(min_replicas=least, max_replicas=2 * least)
    rate = Random(wish.seed).uniform(3.0, 6.0)
    return write_decisions(
        _path(home, "idle", wish), wish, settings, Fleet(per_s=4.0, start_s=45.0, ready=least), day(rate)
    )


def cold(wish: Wish, home: Home) -> Path:
    """Bursts that need more replicas, which take minutes to start."""
    period = Random(wish.seed).uniform(900.0, 1500.0)

    def bursts(now: float) -> float:
        return 3.0 + (14.0 * wish.severity if now % period > 0.65 * period else 0.0)

    settings = Autoscale(min_replicas=1, max_replicas=24, cooldown_s=60.0)
    return write_decisions(_path(home, "cold", wish), wish, settings, Fleet(per_s=4.0, start_s=150.0), bursts)


def capped(wish: Wish, home: Home) -> Path:
    """The policy allows fewer replicas than the traffic needs."""
    settings = Autoscale(min_replicas=1, max_replicas=3)
    rate = 12.0 + 8.0 * wish.severity
    return write_decisions(
        _path(home, "capped", wish), wish, settings, Fleet(per_s=4.0, start_s=30.0, ready=3), day(rate, 0.1)
    )


def large(wish: Wish, home: Home) -> Path:
    """One replica that serves many times what is asked."""
    settings = Autoscale(min_replicas=1, max_replicas=4)
    return write_decisions(
        _path(home, "large", wish), wish, settings, Fleet(per_s=40.0, start_s=60.0), day(8.0 / max(wish.severity, 0.8))
    )


def well_sized(wish: Wish, home: Home) -> Path:
    """A fleet that follows its traffic."""
    settings = Autoscale(min_replicas=2, max_replicas=20)
    rate = Random(wish.seed).uniform(18.0, 40.0)
    return write_decisions(
        _path(home, "well-sized", wish), wish, settings, Fleet(per_s=4.0, start_s=30.0, ready=10), day(rate, 0.3)
    )


PROBLEMS = (
    Problem(
        name="service-idle",
        says="more replicas than are needed",
        make=idle,
        loop="product",
        causes=("over_provisioned",),
        levers=("--set", "*"),
        simulated=True,
    ),
    Problem(
        name="service-cold",
        says="bursts wait for starts",
        make=cold,
        loop="product",
        causes=("cold_starts",),
        levers=("--set", "weights"),
        simulated=True,
    ),
    Problem(
        name="service-capped",
        says="fewer replicas allowed than needed",
        make=capped,
        loop="product",
        causes=("too_few_replicas",),
        levers=("--set",),
        simulated=True,
    ),
    Problem(
        name="service-large",
        says="a replica that is hardly used",
        make=large,
        loop="product",
        causes=("wrong_replica_size",),
        levers=("armillary",),
        simulated=True,
    ),
)
HEALTHY = (Problem(name="service-healthy", says="follows its traffic", make=well_sized, loop=None, simulated=True),)
