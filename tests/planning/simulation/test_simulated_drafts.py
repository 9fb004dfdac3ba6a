"""Speculation in a simulation: the engine's own decides what is drafted; tokens stay as many as without."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from armillary.engine.scheduler.settings import Settings
from armillary.planning.simulation.fleet_case import fleet_case
from armillary.planning.simulation.replayed_requests import Arrival, Prompts
from armillary.planning.simulation.simulated_drafts import drafting_of
from armillary.planning.simulation.simulated_engine import System
from armillary.planning.simulation.simulated_replica import Served, SimulatedReplica
from armillary.planning.simulation.step_cost import StepCost
from armillary.spec import catalogue
from armillary.spec.recipe import recipe_from_dict
from armillary.store.home import Home

COST = StepCost(base_s=0.02, prefill_s=1e-4, decode_s=1e-4, waits=True)
SMALL = StepCost(base_s=0.001, prefill_s=1e-5, decode_s=1e-5, waits=True)
SYSTEM = System(settings=Settings(max_model_len=512, vocab=100, max_running=8), num_blocks=400, streamed=True)
REQUESTS = [
    Arrival(number=i + 1, at_s=0.5 * i, tokens_in=32, tokens_out=60, limit=60 if i % 2 else 90) for i in range(12)
]


def serve(acceptance: float | None) -> tuple[list[Served], SimulatedReplica]:
    drafting = None if acceptance is None else drafting_of(acceptance, 6, COST, 60.0, SMALL)
    replica, prompts = SimulatedReplica("one", replace(SYSTEM, drafting=drafting), COST), Prompts(REQUESTS)
    over: list[Served] = []
    for arrival in REQUESTS:
        over += replica.advance(arrival.at_s)
        assert replica.submit(arrival, prompts.of(arrival), arrival.at_s)
    return sorted(over + replica.advance(1e9)), replica


def tpot(served: list[Served]) -> float:
    return sum((each.end_s - each.first_s) / (each.tokens_out - 1) for each in served) / len(served)


def test_good_drafts_make_tokens_faster_and_as_many() -> None:
    plain, fast = serve(None)[0], serve(0.8)
    assert [each.tokens_out for each in fast[0]] == [each.tokens_out for each in plain] == [60] * 12
    totals = fast[1].scheduler.totals
    assert totals.accepted > 100 and totals.drafted > totals.accepted
    expected = (1 - 0.8**7) / (1 - 0.8) * 0.02 / (0.02 + 6 * 0.001)  # tokens per step, over the longer step
    assert tpot(plain) / tpot(fast[0]) == pytest.approx(expected, rel=0.25)


def test_bad_drafts_are_given_up() -> None:
    plain, slow = serve(None)[0], serve(0.02)[0]
    assert tpot(slow) < 1.15 * tpot(plain)


def test_a_draft_head_costs_one_layer(tmp_path: Path) -> None:
    recipe = recipe_from_dict({"model": {"name": "llama-3-8b"}, "serve": {"speculate": "mtp"}})
    case = fleet_case(recipe, catalogue.model("llama-3-8b").config, catalogue.cluster("h100x1"), Home.at(tmp_path))
    drafting = case.system.drafting
    assert drafting is not None and drafting.propose_s is not None
    layer_and_head = (0.22 + 2 * 0.53) / 8.03  # billions of weights
    assert drafting.propose_s[1] / drafting.verify_s[1] < 1.5 * layer_and_head
