"""A fleet on a virtual clock: requests are shared out, starts take time, what fails is replaced, nothing is lost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from armillary.engine.scheduler.settings import Settings
from armillary.fleet.autoscale.policy import Autoscaler
from armillary.fleet.autoscale.replica_capacity import Limits
from armillary.planning.simulation.fleet_run import FleetRun
from armillary.planning.simulation.replayed_requests import Arrival, drawn
from armillary.planning.simulation.simulated_engine import System
from armillary.planning.simulation.simulated_fleet import SimulatedFleet
from armillary.planning.simulation.step_cost import StepCost
from armillary.spec.tables.fleet import Autoscale, Fleet
from armillary.spec.tables.traffic import Traffic

COST = StepCost(base_s=0.02, prefill_s=1e-4, decode_s=1e-3, waits=True)
SYSTEM = System(settings=Settings(max_model_len=512, vocab=100, max_running=8), num_blocks=400, streamed=True)


def many(rate: float, seconds: float) -> list[Arrival]:
    return list(drawn(Traffic(requests_per_s=rate, tokens_in=64, tokens_out=20, duration_s=seconds)))


def p50(run: FleetRun) -> float:
    ttfts = sorted(each.first_s - each.arrived_s for each in run.served)
    return ttfts[len(ttfts) // 2]


@pytest.mark.parametrize("policy", ["least-load", "round-robin", "power-of-two", "prefix"])
def test_replicas_share_the_requests(policy: str) -> None:
    arrivals = many(20.0, 10.0)
    fleet = Fleet(replicas=4, policy=policy)  # type: ignore[arg-type]
    run = SimulatedFleet(arrivals, SYSTEM, COST, fleet).run()
    counts = [sum(each.replica == life.name for each in run.served) for life in run.lives]
    assert sum(counts) == len(arrivals) == 200 and min(counts) > 25
    alone = SimulatedFleet(arrivals, SYSTEM, COST, Fleet(replicas=1)).run()
    assert p50(run) < p50(alone) / 3


def test_the_same_seed_gives_the_same_run() -> None:
    arrivals, fleet = many(20.0, 5.0), Fleet(replicas=3, failures_per_hour=400, start_s=1.0)
    first, again = (SimulatedFleet(arrivals, SYSTEM, COST, fleet, seed=3).run() for _ in range(2))
    assert first.served == again.served and first.broken == again.broken


def test_what_fails_is_replaced_and_every_request_is_accounted_for() -> None:
    arrivals = many(20.0, 30.0)
    fleet = Fleet(replicas=3, failures_per_hour=240, start_s=2.0, detect_s=1.0)
    run = SimulatedFleet(arrivals, SYSTEM, COST, fleet, seed=1).run()
    assert len(run.lives) > 3 and run.broken > 0
    numbers = [each.number for each in run.served]
    assert len(set(numbers)) == len(numbers) == len(arrivals) - run.broken - run.unserved - run.refused
    failed = [life for life in run.lives if life.state == "failed"]
    assert all(each.end_s <= life.ended_s + 0.2 for life in failed for each in run.served if each.replica == life.name)


def test_requests_wait_for_the_first_replica_of_a_service_scaled_to_zero() -> None:
    settings = Autoscale(
        min_replicas=0, max_replicas=2, interval_s=1.0, idle_s=5.0, cooldown_s=4.0, stable_window_s=4.0
    )
    scaler = Autoscaler(settings, Limits(requests_per_s=10.0, in_flight=8.0), start_s=3.0)
    first = Arrival(number=1, at_s=10.0, tokens_in=64, tokens_out=5, limit=5)
    later = replace(first, number=2, at_s=40.0)
    run = SimulatedFleet([first, later], SYSTEM, COST, Fleet(replicas=0, start_s=3.0), autoscaler=scaler).run()
    assert [each.number for each in run.served] == [1, 2] and run.unserved == 0
    assert 3.0 <= run.served[0].first_s - 10.0 <= 3.0 + 2 * settings.interval_s
    assert len(run.lives) == 2 and run.lives[0].ended_s < 30.0  # stopped while idle, started again
    assert run.replica_s < 30.0


def test_a_request_that_no_replica_takes_is_given_up() -> None:
    late = [Arrival(number=1, at_s=0.0, tokens_in=64, tokens_out=5, limit=5)]
    run = SimulatedFleet(late, SYSTEM, COST, Fleet(replicas=0, max_wait_s=2.0)).run()
    assert run.unserved == 1 and not run.served


def test_scale_down_drains() -> None:
    """A replica that is stopped under load finishes what it has."""
    arrivals = many(20.0, 10.0)
    run = SimulatedFleet(arrivals, SYSTEM, COST, Fleet(replicas=4), schedule=[(5.0, 1)]).run()
    assert len(run.served) == len(arrivals)
    stopped = [life for life in run.lives if life.state == "stopped"]
    assert len(stopped) == 3
    for life in stopped:
        ends = [each.end_s for each in run.served if each.replica == life.name]
        assert life.ended_s >= 5.0 and max(ends) <= life.ended_s + 1e-9


def test_a_cold_start_is_paid_for_and_serves_nothing() -> None:
    run = SimulatedFleet(many(20.0, 10.0), SYSTEM, COST, Fleet(replicas=1, start_s=4.0), schedule=[(2.0, 2)]).run()
    second = run.lives[1]
    assert (second.began_s, second.ready_s) == (2.0, 6.0)
    assert min(each.started_s for each in run.served if each.replica == second.name) >= 6.0
    assert run.replica_s == pytest.approx(run.end_s + run.end_s - 2.0)
