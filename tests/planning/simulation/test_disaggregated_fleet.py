"""Separate pools for prompts and tokens: what a request takes, what the pools gain and cost, and what does not fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from armillary.engine.scheduler.settings import Settings
from armillary.errors import BadInput
from armillary.planning.simulation.fleet_case import FleetCase, fleet_case
from armillary.planning.simulation.fleet_outcome import FleetOutcome
from armillary.planning.simulation.replayed_requests import Arrival, drawn
from armillary.planning.simulation.simulated_engine import System
from armillary.planning.simulation.step_cost import StepCost
from armillary.spec import catalogue
from armillary.spec.recipe import recipe_from_dict
from armillary.spec.tables.fleet import Autoscale, Fleet
from armillary.spec.tables.traffic import Objective, Traffic
from armillary.store.home import Home

COST = StepCost(base_s=0.01, prefill_s=1e-4, decode_s=1e-4, waits=True)
SYSTEM = System(settings=Settings(max_model_len=4096, vocab=100, max_running=64), num_blocks=20_000, streamed=True)


def moving(tokens: int) -> float:
    return 1e-5 * tokens


def case_of(arrivals: list[Arrival], **fleet: Any) -> FleetCase:
    return FleetCase(
        system=SYSTEM,
        cost=COST,
        arrivals=arrivals,
        fleet=Fleet(**{"policy": "least-load", **fleet}),
        autoscale=Autoscale(),
        objective=Objective(),
        traffic=Traffic(),
        usd_per_replica_hour=3.6,
        transfer_s=moving,
    )


def test_a_request_alone_waits_for_its_prompt_its_cache_and_a_step() -> None:
    one = Arrival(number=1, at_s=0.0, tokens_in=1000, tokens_out=20, limit=20)
    run = case_of([one], prefill_replicas=1).run()
    (served,) = run.served
    prefill_s, step_s = COST.base_s + 1000 * COST.prefill_s, COST.base_s + COST.decode_s
    assert served.first_s == pytest.approx(prefill_s + moving(1000) + step_s)
    assert served.end_s == pytest.approx(served.first_s + 19 * step_s) and served.tokens_out == 20


def test_prompts_no_longer_lengthen_gaps_and_both_pools_are_paid() -> None:
    traffic = Traffic(requests_per_s=12.0, tokens_in=1500, tokens_out=60, duration_s=30.0)
    arrivals = list(drawn(traffic))
    both, apart = (
        FleetOutcome(case, case.run())
        for case in (case_of(arrivals, replicas=4), case_of(arrivals, replicas=2, prefill_replicas=2))
    )
    assert len(apart.run.served) == len(arrivals)
    steps = COST.decode_seconds(64, 0)
    assert apart.gauges["itl_p99_s"] <= steps < both.gauges["itl_p99_s"]
    assert len(apart.run.lives) == 4 and sum("prefill" in life.name for life in apart.run.lives) == 2
    assert apart.gauges["usd"] == pytest.approx(4 * 3.6 * apart.run.end_s / 3600)
    slow = case_of(arrivals, replicas=2, prefill_replicas=2)
    later = FleetOutcome(slow, replace(slow, transfer_s=lambda tokens: 0.5).run())
    assert later.gauges["ttft_p50_s"] > apart.gauges["ttft_p50_s"] + 0.4


def test_a_recipe_moves_caches_over_its_link(tmp_path: Any) -> None:
    tables = {
        "model": {"name": "llama-3-8b"},
        "hardware": {"on": "h100x8"},
        "traffic": {"requests_per_s": 4.0, "duration_s": 5.0, "tokens_in": 1000, "tokens_out": 20},
        "fleet": {"prefill_replicas": 1},
    }
    recipe = recipe_from_dict(tables)
    case = fleet_case(recipe, catalogue.model("llama-3-8b").config, catalogue.cluster("h100x8"), Home.at(tmp_path))
    assert case.transfer_s is not None and 0.0 < case.transfer_s(1000) < case.transfer_s(4000)
    assert len(case.run().served) == len(case.arrivals)


@pytest.mark.parametrize(
    ("changed", "wrong"),
    [
        ({"autoscale": Autoscale(max_replicas=3)}, "autoscale.max_replicas"),
        ({"fleet": Fleet(prefill_replicas=1, failures_per_hour=1.0)}, "failures_per_hour"),
        ({"fleet": Fleet(prefill_replicas=1, simulate="curve")}, "simulate=each"),
    ],
)
def test_what_is_not_simulated_is_said(changed: dict[str, Any], wrong: str) -> None:
    one = Arrival(number=1, at_s=0.0, tokens_in=10, tokens_out=2, limit=2)
    with pytest.raises(BadInput, match=wrong):
        replace(case_of([one], prefill_replicas=1), **changed).run()
