"""Autoscaling a small service: fixed and autoscaled fleets under one rush, by replica hours and requests in time.

    python examples/autoscaling.py             a minute; writes autoscaling/table.md and two plots
    python examples/autoscaling.py --quick     a shorter rush, two fleets

Scheduler, router and autoscaler are those that serve, on a virtual clock: step times are the planner's, of a GPU that
this machine need not have. docs/exercises/autoscaling.md says what to predict first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from exercise import finish, read_options, table

from armillary.fleet.autoscale.replica_capacity import Limits
from armillary.planning.simulation.fleet_case import FleetCase, fleet_case, replica_limits
from armillary.planning.simulation.fleet_outcome import FleetOutcome
from armillary.planning.simulation.replayed_requests import Arrival, drawn
from armillary.report.charts import lines
from armillary.spec.recipe import recipe_from_dict
from armillary.spec.tables.fleet import Autoscale, Fleet
from armillary.spec.tables.traffic import Traffic
from armillary.store.home import Home
from armillary.units import dollars_text, seconds_text

MODEL, CHIP = "llama-3-8b", "l4"
PHASES = ((0.5, 120.0), (3.0, 180.0), (1.0, 180.0), (0.3, 180.0))
"""traffic: times the capacity of one replica, and for how long"""
RUSH_S = PHASES[0][1]
AUTOSCALED = Autoscale(max_replicas=4, cooldown_s=60.0, stable_window_s=30.0)
FLEETS: dict[str, tuple[Fleet, Autoscale]] = {
    "1 replica": (Fleet(replicas=1), Autoscale()),
    "2 replicas": (Fleet(replicas=2), Autoscale()),
    "4 replicas": (Fleet(replicas=4), Autoscale()),
    "autoscaled, start in 60 s": (Fleet(replicas=1, start_s=60.0), AUTOSCALED),
    "autoscaled, start in 10 s": (Fleet(replicas=1, start_s=10.0), AUTOSCALED),
    "autoscaled, 60 s, target 0.5": (Fleet(replicas=1, start_s=60.0), replace(AUTOSCALED, target=0.5)),
    "autoscaled, 60 s, at least 2": (Fleet(replicas=2, start_s=60.0), replace(AUTOSCALED, min_replicas=2)),
}
QUICK = ("4 replicas", "autoscaled, start in 10 s")
DRAWN = ("autoscaled, start in 60 s", "autoscaled, start in 10 s", "autoscaled, 60 s, target 0.5")


@dataclass(frozen=True, kw_only=True)
class Served:
    """A fleet, and what it did."""

    name: str
    outcome: FleetOutcome

    def ready(self) -> list[tuple[float, float]]:
        """(seconds, replicas), as steps."""
        points: list[tuple[float, float]] = []
        for look in self.outcome.run.timeline:
            if points and points[-1][1] != look.ready:
                points.append((look.now, points[-1][1]))
            points.append((look.now, float(look.ready)))
        return points

    def waiting(self) -> list[tuple[float, float]]:
        return [(look.now, float(look.waiting)) for look in self.outcome.run.timeline]

    def reacted_s(self) -> float | None:
        """From the begin of the rush until one more replica is ready."""
        looks = self.outcome.run.timeline
        before = max((look.ready for look in looks if look.now <= RUSH_S), default=0)
        return next((look.now - RUSH_S for look in looks if look.now > RUSH_S and look.ready > before), None)


def base_case(home: Home) -> FleetCase:
    """One replica; the requests are replaced below."""
    recipe = recipe_from_dict(
        {
            "model": {"name": MODEL},
            "hardware": {"on": CHIP},
            "traffic": {"tokens_in": 512, "tokens_out": 128},
            "objective": {"ttft_p99_s": 2.0},
        }
    )
    return fleet_case(recipe, recipe.model_config(), recipe.cluster(), home)


def rush(traffic: Traffic, capacity: float, phases: Sequence[tuple[float, float]]) -> list[Arrival]:
    """Poisson arrivals, phase after phase."""
    arrivals: list[Arrival] = []
    begin = 0.0
    for seed, (factor, duration_s) in enumerate(phases):
        rate = factor * capacity
        drawn_here = drawn(replace(traffic, requests_per_s=rate, duration_s=duration_s, seed=seed))
        for each in drawn_here:
            if each.at_s < duration_s:
                arrivals.append(replace(each, number=len(arrivals) + 1, at_s=begin + each.at_s))
        begin += duration_s
    return arrivals


def serve(case: FleetCase, name: str, limits: Limits) -> Served:
    fleet, autoscale = FLEETS[name]
    case = replace(case, fleet=fleet, autoscale=autoscale)
    return Served(name=name, outcome=FleetOutcome(case, case.run(limits=limits)))


def row(served: Served, most_hours: float) -> tuple[str, ...]:
    outcome = served.outcome
    gauges, changes = outcome.gauges, [each for _, each in outcome.run.decisions if each.change]
    reacted_s = served.reacted_s()
    return (
        served.name,
        f"{outcome.slo_fraction:.1%}",
        seconds_text(gauges["ttft_p50_s"]),
        seconds_text(gauges["ttft_p99_s"]),
        f"{gauges['replica_hours']:.2f}",
        dollars_text(gauges["usd"]),
        f"{gauges['replica_hours'] / most_hours:.0%}",
        f"{gauges['busy_fraction']:.0%}",
        f"{sum(each.change > 0 for each in changes)} up, {sum(each.change < 0 for each in changes)} down",
        "–" if reacted_s is None else seconds_text(reacted_s),
    )


def main() -> None:
    options = read_options("autoscaling", __doc__)
    names = QUICK if options.quick else tuple(FLEETS)
    phases = tuple((factor, length_s / 6) for factor, length_s in PHASES) if options.quick else PHASES
    base = base_case(Home.default())
    limits = replica_limits(base)
    print(f"one replica serves {limits.requests_per_s:.2f} requests/s in time", flush=True)
    case = replace(base, arrivals=rush(base.traffic, limits.requests_per_s, phases))
    found = []
    for fleet in names:
        found.append(serve(case, fleet, limits))
        print(f"{fleet}: {found[-1].outcome.slo_fraction:.1%} in time", flush=True)
    most = next(each.outcome.gauges["replica_hours"] for each in found if each.name == "4 replicas")
    heads = ("fleet", "in time", "TTFT p50", "p99", "replica hours", "cost", "of 4 replicas'", "busy", "decisions")
    heads += ("one more after",)
    peak = max(factor for factor, _ in phases)
    text = (
        f"{MODEL} on one {CHIP.upper()}: a replica serves {limits.requests_per_s:.2f} requests/s with a TTFT p99 below "
    )
    text += f"{seconds_text(base.objective.ttft_p99_s or 0.0)}; {len(case.arrivals):,} requests, at most {peak:g} "
    text += f"times that rate, so {ceil(peak / AUTOSCALED.target)} replicas at a target of {AUTOSCALED.target:g}:\n\n"
    text += table(heads, [row(each, most) for each in found])
    drawn_here = [each for each in found if each.name in DRAWN]
    needed = [("needed at the target", needed_by(phases))]
    replicas = lines(
        [(each.name, each.ready()) for each in drawn_here] + needed,
        label="Replicas that are ready, by time",
        x_name="seconds (replicas that are ready)",
    )
    waiting = lines(
        [(each.name, each.waiting()) for each in drawn_here],
        label="Requests that wait, by time",
        x_name="seconds (requests that wait for their first step)",
    )
    finish(options, text, replicas, "replicas that are ready", (waiting, "requests that wait for their first step"))


def needed_by(phases: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Replicas at which each would run at the target, as steps."""
    points, begin = [], 0.0
    for factor, duration_s in phases:
        needed = float(ceil(factor / AUTOSCALED.target))
        points += [(begin, needed), (begin + duration_s, needed)]
        begin += duration_s
    return points


if __name__ == "__main__":
    main()
