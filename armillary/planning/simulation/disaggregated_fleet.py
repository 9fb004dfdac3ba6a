"""A fleet with separate pools for prompts and for tokens: the two are simulated one after the other.

Nothing in the prefill pool depends on the decode pool, so its requests are served first, one token each. Each then
arrives at the decode pool once its KV cache has moved there, which the planner prices
(planning/serving/disaggregation): a step that takes it in computes one token for it and no prompt. As in the planner,
the first token that a client sees is the first of the decode pool:

    TTFT = wait + prefill + transfer + wait + one decode step
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from armillary.errors import BadInput
from armillary.planning.simulation.fleet_run import FleetRun
from armillary.planning.simulation.simulated_engine import System
from armillary.planning.simulation.simulated_fleet import SimulatedFleet
from armillary.planning.simulation.step_cost import StepCost

if TYPE_CHECKING:
    from armillary.planning.simulation.fleet_case import FleetCase


def disaggregated(case: FleetCase, seed: int) -> FleetRun:
    """Both pools; the run's timeline is that of the decode pool, its replicas and cost are those of both."""
    _check(case)
    assert case.transfer_s is not None, "fleet_case gives it to fleets with two pools"
    fleet = replace(case.fleet, prefill_replicas=0)
    prompts = [replace(each, tokens_out=1, limit=1) for each in case.arrivals]
    pool = replace(fleet, replicas=case.fleet.prefill_replicas)
    first = SimulatedFleet(prompts, case.system, case.cost, pool, seed=seed).run()
    asked, prefilled = {each.number: each for each in case.arrivals}, {each.number: each for each in first.served}
    arrivals = [
        replace(
            asked[number],
            at_s=served.end_s + case.transfer_s(served.tokens_in),
            shared_prefix=0,
            prefix_source=0,
        )
        for number, served in prefilled.items()
    ]
    arrivals.sort(key=lambda each: (each.at_s, each.number))
    second = SimulatedFleet(arrivals, _decoding(case.system), _taking_in(case.cost), fleet, seed=seed).run()
    second.served = [
        served._replace(
            arrived_s=prefilled[served.number].arrived_s,
            started_s=prefilled[served.number].started_s,
            cached=prefilled[served.number].cached,
        )
        for served in second.served
    ]
    second.refused += first.refused
    second.unserved += first.unserved
    for life in first.lives:
        life.name = life.name.replace("replica", "prefill")
        life.ended_s = min(life.ended_s, second.end_s)
    second.lives += first.lives
    return second


def _check(case: FleetCase) -> None:
    if not case.fleet.replicas:
        raise BadInput("fleet.prefill_replicas needs replicas that decode; set fleet.replicas=1 or more")
    if case.autoscale.is_on or case.fleet.failures_per_hour:
        raise BadInput(
            "fleet.prefill_replicas is simulated with fixed pools that do not fail; leave autoscale.max_replicas and "
            "fleet.failures_per_hour out"
        )
    if case.system.drafting is not None or case.fleet.simulate == "curve":
        raise BadInput("fleet.prefill_replicas is simulated with fleet.simulate=each and without serve.speculate")


def _decoding(system: System) -> System:
    """Prompts are there already: no step is kept short for them, and none is looked up."""
    settings = replace(system.settings, max_tokens_per_step=1 << 30, max_chunk=None, prefill_tokens=None)
    return replace(system, settings=settings, prefix=False, streamed=False)


def _taking_in(cost: StepCost) -> StepCost:
    """A step's time in which a prompt counts as one decode."""
    bare = replace(cost, prompt_s=0.0, mixed_s=0.0, prefill_s=0.0, prefill_bends=(), pair_s=0.0, past_s=0.0)
    return replace(bare, row_s=cost.decode_s)
