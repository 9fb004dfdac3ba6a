"""A fleet computed from a capacity curve agrees with the full simulation of every replica."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from armillary.engine.scheduler.settings import Settings
from armillary.errors import BadInput
from armillary.fleet.autoscale.replica_capacity import Limits
from armillary.planning.simulation.capacity_curve import capacity_curve
from armillary.planning.simulation.curve_fleet import CurveFleet, demand
from armillary.planning.simulation.curve_outcome import CurveOutcome
from armillary.planning.simulation.fleet_case import FleetCase
from armillary.planning.simulation.fleet_outcome import FleetOutcome
from armillary.planning.simulation.replayed_requests import drawn
from armillary.planning.simulation.simulated_engine import System
from armillary.planning.simulation.step_cost import StepCost
from armillary.spec.tables.fleet import Autoscale, Fleet
from armillary.spec.tables.traffic import Objective, Traffic

TRAFFIC = Traffic(requests_per_s=60.0, tokens_in=48, tokens_out=12, duration_s=25.0)
CASE = FleetCase(
    system=System(settings=Settings(max_model_len=512, vocab=100, max_running=8), num_blocks=400, streamed=True),
    cost=StepCost(base_s=0.02, prefill_s=2e-4, decode_s=1e-3, waits=True),
    arrivals=drawn(TRAFFIC, 1500),
    fleet=Fleet(replicas=6, policy="least-load"),
    autoscale=Autoscale(),
    objective=Objective(ttft_p99_s=0.5),
    traffic=TRAFFIC,
    usd_per_replica_hour=2.0,
)


def test_a_small_fleet_agrees_with_its_full_simulation() -> None:
    curve = capacity_curve(CASE, requests=60, workers=1)
    assert curve.most_per_s == pytest.approx(8 / (12 * 0.028 + 8 * 0.0096), rel=0.15)  # eight sequences at once
    computed, full = CurveOutcome(CASE, CurveFleet(CASE, curve).run()), FleetOutcome(CASE, CASE.run())
    for name in ("ttft_p50_s", "itl_p50_s", "tpot_p50_s", "e2e_p50_s", "tokens_out_per_s", "usd"):
        assert computed.gauges[name] == pytest.approx(full.gauges[name], rel=0.05), name
    assert computed.slo_fraction == pytest.approx(full.slo_fraction, abs=0.01)


def test_requests_beyond_the_capacity_wait() -> None:
    curve = capacity_curve(CASE, requests=20, workers=1)
    few = replace(CASE, fleet=replace(CASE.fleet, replicas=2))
    outcome = CurveOutcome(few, CurveFleet(few, curve).run())
    served_s = len(CASE.arrivals) / (2 * curve.most_per_s)
    assert outcome.run.end_s == pytest.approx(served_s, rel=0.1)
    assert outcome.gauges["ttft_p99_s"] > 0.5 * (served_s - 25.0) and outcome.slo_fraction < 0.2


def test_the_autoscaler_is_the_real_one() -> None:
    curve = capacity_curve(CASE, requests=20, workers=1)
    settings = Autoscale(max_replicas=20, interval_s=1.0, stable_window_s=4.0, panic_window_s=2.0)
    case = replace(CASE, fleet=replace(CASE.fleet, replicas=1, start_s=2.0), autoscale=settings)
    scaler = case.autoscaler(Limits(requests_per_s=12.0, in_flight=5.0, ttft_s=0.5))
    run = CurveFleet(case, curve, autoscaler=scaler).run()
    assert run.timeline[-1].ready >= 5 and run.started >= 5
    assert any(decision.change > 0 for _, decision in run.decisions)
    assert run.replica_s < 20 * run.end_s


def test_failed_replicas_break_streams_and_are_replaced() -> None:
    curve = capacity_curve(CASE, requests=20, workers=1)
    fleet = replace(CASE.fleet, replicas=8, failures_per_hour=200.0, start_s=2.0, detect_s=1.0)
    run = CurveFleet(replace(CASE, fleet=fleet), curve).run()
    assert run.broken > 0 and run.started > 8 and run.timeline[-1].ready + run.timeline[-1].starting >= 6


def test_rates_are_means_over_their_surroundings() -> None:
    counts, rates = demand(np.arange(0, 100, 0.01), 2.0)
    assert counts.sum() == 20_000 and rates == pytest.approx(np.full(100, 200.0))


def test_shared_prefixes_need_every_replica() -> None:
    arrivals = drawn(replace(TRAFFIC, shared_prefix=32), 100)
    with pytest.raises(BadInput, match=r"fleet\.simulate=each"):
        capacity_curve(replace(CASE, arrivals=arrivals))
