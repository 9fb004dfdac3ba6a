"""Autoscaling a small service: fixed and autoscaled fleets under one rush, by replica hours and requests in time.

    python examples/autoscaling.py             two minutes; writes autoscaling/table.md and two plots
    python examples/autoscaling.py --quick     a shorter rush, two fleets

Step times are measured with the engine on this CPU; scheduler, router and autoscaler are those that serve, on a
virtual clock, because two cores cannot run four replicas. docs/exercises/autoscaling.md says what to predict first.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

from exercise import finish, read_options, table

from armillary.cli.simulate import fleet_case_of
from armillary.fleet.autoscale.capacity import Limits
from armillary.planning.simulation.fleet_case import FleetCase, replica_limits
from armillary.planning.simulation.fleet_outcome import FleetOutcome
from armillary.planning.simulation.replayed_requests import Arrival, drawn
from armillary.planning.simulation.step_cost import StepNoise
from armillary.report.charts import lines
from armillary.spec.recipe import recipe_from_dict, to_toml
from armillary.spec.tables.fleet import Autoscale, Fleet
from armillary.spec.tables.serve import Traffic
from armillary.store.home import Home
from armillary.units import seconds_text

MODEL = "armillary-5m"
PHASES = ((0.5, 60.0), (3.0, 90.0), (1.0, 90.0), (0.3, 90.0))
"""traffic: times the capacity of one replica, and for how long"""
RUSH_S = PHASES[0][1]
AUTOSCALED = Autoscale(max_replicas=4, interval_s=2.0, cooldown_s=30.0, stable_window_s=15.0, panic_window_s=5.0)
FLEETS: dict[str, tuple[Fleet, Autoscale]] = {
    "1 replica": (Fleet(replicas=1), Autoscale()),
    "2 replicas": (Fleet(replicas=2), Autoscale()),
    "4 replicas": (Fleet(replicas=4), Autoscale()),
    "autoscaled, start in 30 s": (Fleet(replicas=1, start_s=30.0), AUTOSCALED),
    "autoscaled, start in 5 s": (Fleet(replicas=1, start_s=5.0), AUTOSCALED),
    "autoscaled, 30 s, target 0.5": (Fleet(replicas=1, start_s=30.0), replace(AUTOSCALED, target=0.5)),
    "autoscaled, 30 s, at least 2": (Fleet(replicas=2, start_s=30.0), replace(AUTOSCALED, min_replicas=2)),
}
QUICK = ("4 replicas", "autoscaled, start in 5 s")
DRAWN = ("autoscaled, start in 30 s", "autoscaled, start in 5 s", "autoscaled, 30 s, target 0.5")


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


def measured_run(folder: Path, quick: bool) -> str:
    """The run of an engine on this CPU, whose step times the simulation takes."""
    requests = "8" if quick else "48"
    line = [sys.executable, "-m", "armillary", "bench", "serve", MODEL, "--mode", "continuous", "--dtype", "fp32"]
    line += ["--device", "cpu", "--requests", requests, "--json", "--home", str(folder)]
    answer = subprocess.run(line, check=True, text=True, stdout=subprocess.PIPE).stdout
    return str(json.loads(answer)["run"])


def base_case(folder: Path, run: str) -> FleetCase:
    """One replica with measured steps; the requests are replaced below."""
    recipe = recipe_from_dict(
        {
            "model": {"name": MODEL},
            "hardware": {"on": "here"},
            "traffic": {"tokens_in": 128, "tokens_out": 32, "duration_s": 60.0},
            "objective": {"ttft_p99_s": 2.0},
            "serve": {"max_running": 8},
        }
    )
    file = folder / "service.toml"
    file.write_text(to_toml(recipe))
    case = fleet_case_of(Home.at(folder), file, run, ())[0]
    # other programs on this machine made some steps slow, and are no part of the service
    return replace(case, cost=replace(case.cost, noise=StepNoise()))


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
        f"{gauges['replica_hours'] / most_hours:.0%}",
        f"{gauges['busy_fraction']:.0%}",
        f"{sum(each.change > 0 for each in changes)} up, {sum(each.change < 0 for each in changes)} down",
        "–" if reacted_s is None else seconds_text(reacted_s),
    )


def main() -> None:
    options = read_options("autoscaling", __doc__)
    names = QUICK if options.quick else tuple(FLEETS)
    phases = tuple((factor, length_s / 6) for factor, length_s in PHASES) if options.quick else PHASES
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base = base_case(folder, measured_run(folder, options.quick))
    limits = replica_limits(base)
    print(f"one replica serves {limits.requests_per_s:.2f} requests/s in time", flush=True)
    case = replace(base, arrivals=rush(base.traffic, limits.requests_per_s, phases))
    found = []
    for fleet in names:
        found.append(serve(case, fleet, limits))
        print(f"{fleet}: {found[-1].outcome.slo_fraction:.1%} in time", flush=True)
    most = next(each.outcome.gauges["replica_hours"] for each in found if each.name == "4 replicas")
    heads = ("fleet", "in time", "TTFT p50", "p99", "replica hours", "of 4 replicas'", "busy", "decisions")
    heads += ("one more after",)
    peak = max(factor for factor, _ in phases)
    text = f"{MODEL} on this CPU: a replica serves {limits.requests_per_s:.2f} requests/s with a TTFT p99 below "
    text += f"{seconds_text(base.objective.ttft_p99_s or 0.0)}; {len(case.arrivals):,} requests, at most {peak:g} "
    text += f"times that rate, so {ceil(peak / AUTOSCALED.target)} replicas at a target of {AUTOSCALED.target:g}:\n\n"
    text += table(heads, [row(each, most) for each in found])
    drawn_here = [each for each in found if each.name in DRAWN]
    needed = [("needed at the target", needed_by(phases))]
    replicas = lines(
        needed + [(each.name, each.ready()) for each in drawn_here],
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
