"""A fleet on a virtual clock: the real router over simulated replicas, the real autoscaler, cold starts and failures.

The loop pops the next event (an arrival, a replica that is ready, a failure, a decision), moves every replica to its
time and handles it.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from itertools import count
from math import inf
from random import Random

from armillary.fleet.autoscale.policy import Autoscaler
from armillary.fleet.autoscale.signals import Signals
from armillary.fleet.gateway.routing import Replica, Router
from armillary.planning.simulation.fleet_run import FleetRun, Life, Look
from armillary.planning.simulation.replayed_requests import Arrival, Prompts
from armillary.planning.simulation.simulated_engine import System
from armillary.planning.simulation.simulated_replica import Served, SimulatedReplica
from armillary.planning.simulation.step_cost import StepCost
from armillary.planning.simulation.trace_arrivals import has_shared_prefixes
from armillary.spec.tables.fleet import Fleet
from armillary.stats import percentile

START_S = 60.0
"""time of a start where the recipe gives none"""
_TIMELINE_S = 1.0


class SimulatedFleet:
    """One run; make a new one for the next."""

    def __init__(
        self,
        arrivals: Sequence[Arrival],
        system: System,
        cost: StepCost,
        fleet: Fleet,
        *,
        autoscaler: Autoscaler | None = None,
        schedule: Sequence[tuple[float, int]] = (),
        seed: int = 0,
        stretches: bool = True,
    ) -> None:
        """`schedule`: (time, replicas) to have, instead of an autoscaler."""
        shares = has_shared_prefixes(arrivals)
        self._system = system if shares else replace(system, prefix=False)  # no prompt is found, so none is looked up
        self._arrivals, self._cost, self._fleet, self._autoscaler = arrivals, cost, fleet, autoscaler
        self._prompts, self._stretches, self._seed = Prompts(arrivals), stretches, seed
        self._rng = Random(f"failures {seed}")
        self._router = Router((), fleet.policy, seed=seed)
        self._sends_prompts = shares and self._router.needs_prompt
        self._by_name: dict[str, Life] = {}
        self._by_number = {arrival.number: arrival for arrival in arrivals}
        self._parked: deque[tuple[float, Arrival]] = deque()
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = count()
        self._left, self._arrived = len(arrivals), 0
        self._start_s = START_S if fleet.start_s is None else fleet.start_s
        self._looked_at = 0.0
        self._live: list[Life] = []
        self.run_ = FleetRun()
        for at, replicas in schedule:
            self._at(at, lambda now, replicas=replicas: self._scale(now, replicas))  # type: ignore[misc]

    def run(self) -> FleetRun:
        """Until every request is over."""
        for _ in range(self._fleet.replicas):
            self._start(0.0, warm=True)
        if self._autoscaler is not None:
            self._at(self._autoscaler.settings.interval_s, self._decide)
        self._at(0.0, self._look)
        arrivals = iter(self._arrivals)
        arrival = next(arrivals, None)
        while self._left > 0:
            event_at = self._events[0][0] if self._events else inf
            if arrival is not None and arrival.at_s <= event_at:
                self._advance(arrival.at_s)
                self._arrived += 1
                self._route(arrival, arrival.at_s)
                arrival = next(arrivals, None)
            else:
                assert self._events, "requests that are left have a replica, or wait for one"
                now, _, handle = heappop(self._events)
                self._advance(now)
                handle(now)
        self.run_.end_s = max([self.run_.end_s, *(served.end_s for served in self.run_.served)])
        return self.run_

    def _at(self, when: float, handle: Callable[[float], None]) -> None:
        heappush(self._events, (when, next(self._order), handle))

    # --- requests

    def _advance(self, now: float) -> None:
        for life in self._live:
            if life.engine.wake < now:
                over = life.engine.advance(now)
                if over:
                    self._ended(life, over)
        self.run_.end_s = now

    def _ended(self, life: Life, over: list[Served]) -> None:
        for served in over:
            life.routed.in_flight -= 1
            life.routed.breaker.succeeded()
            self._left -= 1
            if served.first_s == inf:
                self.run_.unserved += 1
            else:
                self.run_.served.append(served)
        if life.state == "draining" and not life.routed.in_flight:
            self._stop(life, over[-1].end_s)

    def _route(self, arrival: Arrival, now: float) -> None:
        prompt = self._prompts.of(arrival)
        text = array("I", prompt).tobytes() if self._sends_prompts else b""
        tried: list[Replica] = []
        while (routed := self._router.pick(text, now, tried)) is not None:
            life = self._by_name[routed.name]
            if life.state in ("ready", "draining"):
                break
            routed.breaker.failed(now)  # it has failed, which nobody knows yet
            tried.append(routed)
        if routed is None:
            if not self._parked or self._parked[-1][1] is not arrival:
                self._parked.append((now, arrival))
                self._at(now + self._fleet.max_wait_s, self._give_up)
            return
        if life.engine.submit(arrival, prompt, now):
            routed.in_flight += 1
        else:
            self.run_.refused += 1
            self._left -= 1

    def _give_up(self, now: float) -> None:
        while self._parked and self._parked[0][0] <= now - self._fleet.max_wait_s + 1e-9:
            self._parked.popleft()
            self.run_.unserved += 1
            self._left -= 1

    # --- replicas

    def _scale(self, now: float, replicas: int) -> None:
        """Start or drain replicas, so that so many stay; those that are starting are stopped first."""
        staying = [life for life in self._live if life.state in ("starting", "ready")]
        for _ in range(replicas - len(staying)):
            self._start(now)
        staying.sort(key=lambda life: (life.state == "ready", life.routed.in_flight))
        for life in staying[: max(0, len(staying) - replicas)]:
            self._drain(life, now)

    def _start(self, now: float, *, warm: bool = False) -> None:
        number = len(self.run_.lives)
        name = f"replica {number}"
        ready_s = now if warm else now + self._start_s
        engine = SimulatedReplica(
            name, self._system, self._cost, now=ready_s, seed=self._seed + number, stretches=self._stretches
        )
        life = Life(name=name, engine=engine, routed=Replica(name=name), began_s=now, ready_s=ready_s)
        self.run_.lives.append(life)
        self._live.append(life)
        self._by_name[name] = life
        if warm:
            self._ready(life, now)
        else:
            self._at(ready_s, lambda at: self._ready(life, at))

    def _ready(self, life: Life, now: float) -> None:
        if life.state != "starting":
            return
        life.state = "ready"
        self._router.add(life.routed)
        if self._autoscaler is not None and life.ready_s > life.began_s:
            self._autoscaler.started(life.ready_s - life.began_s)
        rate = self._fleet.failures_per_hour / 3600
        if rate:
            self._at(now + self._rng.expovariate(rate), lambda at: self._fail(life, at))
        waiting, self._parked = self._parked, deque()
        for _, arrival in waiting:
            self._route(arrival, now)

    def _drain(self, life: Life, now: float) -> None:
        if life.state == "starting" or not life.routed.in_flight:
            return self._stop(life, now)
        life.state, life.routed.drained = "draining", True

    def _stop(self, life: Life, now: float, state: str = "stopped") -> None:
        life.state, life.ended_s = state, now
        self._live.remove(life)
        self._router.remove(life.routed)

    def _fail(self, life: Life, now: float) -> None:
        """A replica dies: streams break, requests without output go elsewhere; it is replaced once that is noticed."""
        if life.state not in ("ready", "draining") or not self._left:
            return
        was_ready, life.state, life.ended_s = life.state == "ready", "failed", now
        self._live.remove(life)
        for number, begun in life.engine.lost():
            if begun:
                self.run_.broken += 1
                self._left -= 1
            else:
                self.run_.retried += 1
                self._route(self._by_number[number], now)
        self._at(now + self._fleet.detect_s, lambda at: self._replace(life, at, was_ready))

    def _replace(self, life: Life, now: float, was_ready: bool) -> None:
        self._router.remove(life.routed)
        if was_ready:
            self._start(now)

    # --- decisions

    def _signals(self, now: float) -> Signals:
        ready = [life for life in self._live if life.state in ("ready", "draining")]
        ttfts, gaps, weights, busy_s = list[float](), list[float](), list[float](), 0.0
        for life in ready:
            engine = life.engine
            ttfts += engine.ttfts[life.looked_ttfts :]
            gaps += engine.gaps[life.looked_gaps :]
            weights += engine.gap_weights[life.looked_gaps :]
            life.looked_ttfts, life.looked_gaps = len(engine.ttfts), len(engine.gaps)
            busy_s += engine.busy_s - life.looked_busy_s
            life.looked_busy_s = engine.busy_s
        arrived, self._arrived = self._arrived, 0
        look = self._now(now)
        since, self._looked_at = max(1e-9, now - self._looked_at), now
        return Signals(
            now=now,
            ready=look.ready,
            starting=look.starting,
            arrived_per_s=arrived / since,
            in_flight=look.in_flight,
            waiting=look.waiting,
            kv_used=look.kv_used,
            ttft_p99_s=percentile(ttfts, 99) if ttfts else None,
            itl_p99_s=percentile(gaps, 99, weights) if gaps else None,
            gpu_used=min(1.0, busy_s / since / len(ready)) if ready else None,
        )

    def _now(self, now: float) -> Look:
        ready = [life for life in self._live if life.state == "ready"]
        for life in ready:
            life.engine.end_stretch()
        engines = [life.engine.scheduler for life in ready]
        return Look(
            now=now,
            ready=len(ready),
            starting=sum(life.state == "starting" for life in self._live),
            in_flight=sum(life.routed.in_flight for life in ready),
            waiting=sum(len(engine.request_table.waiting) for engine in engines) + len(self._parked),
            kv_used=sum(engine.cache.used_fraction for engine in engines) / len(engines) if engines else 0.0,
        )

    def _decide(self, now: float) -> None:
        assert self._autoscaler is not None
        signals = self._signals(now)
        decision = self._autoscaler.decide(signals)
        self.run_.decisions.append((signals, decision))
        if decision.change:
            self._scale(now, decision.replicas)
        self._at(now + self._autoscaler.settings.interval_s, self._decide)

    def _look(self, now: float) -> None:
        self.run_.timeline.append(self._now(now))
        self._at(now + _TIMELINE_S, self._look)
