"""The autoscaler in the simulator on an up-and-down day, against an oracle that knows it; see simulator.md.

    python benchmarks/autoscaler_oracle.py [--minutes 30] [--peak 40]

The oracle has, in every interval, the least replicas that serve the requests of the interval at the largest share of a
replica's capacity with which it keeps the objectives for 99 % of them; it starts them exactly in time, and pays for
their starts.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from math import ceil, cos, pi
from random import Random

from armillary.engine.scheduler.settings import Settings
from armillary.fleet.autoscale.policy import Decision
from armillary.planning.simulation.fleet_case import FleetCase, replica_limits
from armillary.planning.simulation.fleet_outcome import FleetOutcome
from armillary.planning.simulation.fleet_run import FleetRun
from armillary.planning.simulation.replayed_requests import Arrival
from armillary.planning.simulation.simulated_engine import System
from armillary.planning.simulation.simulated_fleet import SimulatedFleet
from armillary.planning.simulation.step_cost import StepCost
from armillary.spec.tables.fleet import Autoscale, Fleet
from armillary.spec.tables.traffic import Objective, Traffic

COST = StepCost(base_s=0.014, prefill_s=6e-5, decode_s=1.5e-4, context_s=6e-8, waits=True)
"""about a 70B model on four H200"""
SYSTEM = System(settings=Settings(max_model_len=4096, vocab=100, max_running=64), num_blocks=20_000, streamed=True)
OBJECTIVE = Objective(ttft_p99_s=2.0, itl_p99_s=0.2)
WARM_S = 120.0
"""beginning that is left out"""
STEP_S = 15.0
"""interval of the oracle"""
_SHARES = [0.4 * 1.05**i for i in range(38)]
"""of a replica's capacity, that the oracle tries"""


def day(seconds: float, low: float, peak: float, cycles: int, *, seed: int = 0) -> list[Arrival]:
    """Poisson requests whose rate goes from low to peak and back, so many times."""
    rng, now, arrivals = Random(seed), 0.0, list[Arrival]()
    while (now := now + rng.expovariate(peak)) < seconds:
        rate = low + (peak - low) * (1 - cos(2 * pi * cycles * now / seconds)) / 2
        if rng.random() < rate / peak:
            tokens_in, out = round(rng.lognormvariate(5.8, 0.7)), max(1, round(rng.lognormvariate(4.2, 0.7)))
            number = len(arrivals) + 1
            arrivals.append(Arrival(number=number, at_s=now, tokens_in=tokens_in, tokens_out=out, limit=out))
    return arrivals


def slo(case: FleetCase, run: FleetRun, warm_s: float = WARM_S) -> float:
    """Share of the requests after the warm-up that meet every objective."""
    outcome = FleetOutcome(case, run)
    met = sum(ok for ok, served in zip(outcome.met, run.served, strict=True) if served.arrived_s >= warm_s)
    return met / sum(arrival.at_s >= warm_s for arrival in case.arrivals)


def oracle(case: FleetCase, capacity: float, warm_s: float = WARM_S, *, start_s: float = 0.0) -> tuple[FleetRun, float]:
    """The cheapest schedule that keeps the objectives, and its share of the capacity, to 5 %. Starts take `start_s`,
    which it pays for like anybody: it only knows when to begin."""
    least, most = 0, len(_SHARES)
    best: tuple[FleetRun, float] | None = None
    while least < most:
        middle = (least + most) // 2
        schedule = planned(case, capacity * _SHARES[middle], start_s)
        fleet = replace(case.fleet, replicas=schedule[0][1], start_s=start_s)
        run = SimulatedFleet(case.arrivals, case.system, case.cost, fleet, schedule=schedule).run()
        if slo(case, run, warm_s) < 0.99:
            most = middle
        else:
            best, least = (run, _SHARES[middle]), middle + 1
    assert best is not None, "some share of the capacity keeps the objectives"
    return best


def planned(case: FleetCase, per_replica: float, start_s: float = 0.0) -> list[tuple[float, int]]:
    """(time, replicas that start or are ready): as many as each interval needs are ready when it begins."""
    counts: dict[int, int] = {}
    for arrival in case.arrivals:
        counts[int(arrival.at_s / STEP_S)] = counts.get(int(arrival.at_s / STEP_S), 0) + 1
    needed = [max(1, ceil(counts.get(i, 0) / STEP_S / per_replica)) for i in range(max(counts) + 1)]
    begins = [(i * STEP_S, count) for i, count in enumerate(needed)]
    times = sorted({max(0.0, at - before) for at, _ in begins for before in (0.0, start_s)})
    return [(now, max(n for at, n in begins if now - STEP_S < at <= now + start_s)) for now in times]


def direction_changes(decisions: Iterable[Decision], cooldown_s: float) -> int:
    """Most changes of direction within a cooldown."""
    changes = [(decision.now, decision.change > 0) for decision in decisions if decision.change]
    turns = [now for (_, before), (now, after) in pairwise(changes) if before != after]
    return max((sum(at <= other < at + cooldown_s for other in turns) for at in turns), default=0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--low", type=float, default=2.0)
    parser.add_argument("--peak", type=float, default=40.0)
    parser.add_argument("--start", type=float, default=45.0)
    parser.add_argument("--cycles", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", type=float, default=Autoscale.target)
    args = parser.parse_args()
    settings = Autoscale(max_replicas=32, target=args.target)
    case = FleetCase(
        system=SYSTEM,
        cost=COST,
        arrivals=day(60 * args.minutes, args.low, args.peak, args.cycles, seed=args.seed),
        fleet=Fleet(replicas=1, policy="least-load", start_s=args.start),
        autoscale=settings,
        objective=OBJECTIVE,
        traffic=Traffic(),
    )
    limits = replica_limits(case)
    run = case.run(limits=limits)
    best, share = oracle(case, limits.requests_per_s, start_s=args.start)
    changes = [decision for _, decision in run.decisions if decision.change]
    print(
        f"{len(case.arrivals):,} requests in {run.end_s / 60:.0f} min, "
        f"{limits.requests_per_s:.2f} requests/s by one replica, {limits.pooled_per_s:.2f} by each of many"
    )
    print(
        f"autoscaler: SLO {slo(case, run):.2%} after {WARM_S:.0f} s, {run.replica_s / 3600:.2f} replica hours, "
        f"at most {max(look.ready for look in run.timeline)} replicas, {len(changes)} changes, "
        f"{direction_changes(changes, settings.cooldown_s)} changes of direction within a cooldown at most, "
        f"TTFT p99 {FleetOutcome(case, run).gauges['ttft_p99_s']:.2f} s"
    )
    print(
        f"oracle: SLO {slo(case, best):.2%}, {best.replica_s / 3600:.2f} replica hours at {share:.0%} of the capacity"
    )
    print(f"cost over the oracle's: {run.replica_s / best.replica_s - 1:+.1%}")


if __name__ == "__main__":
    main()
