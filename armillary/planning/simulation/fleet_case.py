"""A recipe's service as it is simulated: engine settings, KV cache, step times, requests, fleet and price."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from pathlib import Path
from random import Random
from statistics import fmean
from typing import TYPE_CHECKING

from armillary.engine.cache.kv_capacity import plan_kv
from armillary.errors import ArmillaryError, BadInput
from armillary.fleet.autoscale.policy import Autoscaler
from armillary.fleet.autoscale.replica_capacity import Limits, pooled_rate
from armillary.planning.cost.cost import device_hour
from armillary.planning.serving.deployment_options import server_of
from armillary.planning.serving.disaggregation import transfer_s
from armillary.planning.serving.serving_memory import kv_capacity_tokens, serving_memory
from armillary.planning.serving.serving_plan import serving_request
from armillary.planning.simulation.disaggregated_fleet import disaggregated
from armillary.planning.simulation.fleet_run import FleetRun
from armillary.planning.simulation.replayed_requests import Arrival, drawn
from armillary.planning.simulation.request_slo import met
from armillary.planning.simulation.simulated_drafts import drafting_of
from armillary.planning.simulation.simulated_engine import System, pooled, system_of
from armillary.planning.simulation.simulated_fleet import SimulatedFleet
from armillary.planning.simulation.step_cost import StepCost, host_block_s, planned_step_cost
from armillary.planning.simulation.trace_arrivals import arrivals_of
from armillary.spec import catalogue
from armillary.spec.hf.config import from_hf
from armillary.spec.tables.fleet import Autoscale, Fleet
from armillary.spec.tables.traffic import Objective, Traffic
from armillary.stats import percentile
from armillary.store.hf_folder import read_config

if TYPE_CHECKING:
    from armillary.spec.hardware import Cluster
    from armillary.spec.model import ModelConfig
    from armillary.spec.recipe import Recipe
    from armillary.spec.tables.serve import Serve
    from armillary.store.home import Home

_MOST_ARRIVALS = 200_000
_PROBES, _POOL_PROBES = 8, 5
"""simulations that look for the capacity of a replica, and of a pool, from the rate of one alone on"""
_POOL = 6
"""replicas that stand for many"""
_PROBE_REQUESTS, _MOST_PROBE_REQUESTS = 800, 2400
_PROBE_RESPONSES = 15
"""least length of a simulation, in times that a request takes"""
_FILLS = 0.15
"""part of a simulation at its beginning that does not count"""
_MET = 0.99
"""share of requests that meet every objective at the capacity"""
_UNLIMITED_TTFT = 4.0
"""without objectives, a replica is full where the TTFT p99 is so many times that of a request alone"""


@dataclass(frozen=True, kw_only=True)
class FleetCase:
    """Everything that a simulation needs."""

    system: System
    cost: StepCost
    arrivals: Sequence[Arrival]
    fleet: Fleet
    autoscale: Autoscale
    objective: Objective
    traffic: Traffic
    usd_per_replica_hour: float | None = None
    """none: no price is known"""
    transfer_s: Callable[[int], float] | None = None
    """of the KV cache of a prompt of so many tokens, between two pools"""
    requests_per_arrival: float = 1.0
    """requests that an arrival stands for, where curves are used"""

    def run(self, *, limits: Limits | None = None, seed: int = 0) -> FleetRun:
        """Simulate it; `limits` of a replica are found by simulation where they are needed and not given."""
        if self.fleet.prefill_replicas:
            return disaggregated(self, seed)
        scaler, fleet = self.autoscaler(limits), self.fleet
        return SimulatedFleet(self.arrivals, self.system, self.cost, fleet, autoscaler=scaler, seed=seed).run()

    def autoscaler(self, limits: Limits | None = None) -> Autoscaler | None:
        """A new one; None where it is off."""
        if not self.autoscale.is_on:
            return None
        return Autoscaler(self.autoscale, limits or replica_limits(self), start_s=self.fleet.start_s)


def fleet_case(
    recipe: Recipe,
    config: ModelConfig,
    cluster: Cluster,
    home: Home,
    *,
    cost: StepCost | None = None,
    kv_tokens: float | None = None,
    arrivals: Sequence[Arrival] | None = None,
) -> FleetCase:
    """The recipe's service; measured step times, KV cache and requests take the place of planned ones."""
    serve, weight = recipe.serve, 1.0
    if arrivals is None:
        weight = _thinned(recipe)
        arrivals = _planned_arrivals(recipe, weight)
    if not arrivals:
        raise BadInput("there is no request to simulate; raise traffic.duration_s, or name a run that served some")
    devices = recipe.layout.tp * recipe.layout.pp * max(recipe.layout.ep, serve.dp_attention)
    prompt = max(1, round(sum(each.tokens_in for each in arrivals) / len(arrivals)))
    context = max(1, prompt + round(sum(each.tokens_out for each in arrivals) / len(arrivals) / 2))
    draft: StepCost | None = None
    moves: Callable[[int], float] | None = None
    if cost is None or kv_tokens is None or serve.has_draft_model or recipe.fleet.prefill_replicas:
        server = server_of(serving_request(recipe, config, cluster, home), recipe.layout)
        serve, moves = server.serve, partial(transfer_s, server.replica)
        kv_tokens = kv_tokens or kv_capacity_tokens(server.replica, serving_memory(server.replica, serve))
        devices = server.replica.split.num_devices
        cost = cost or planned_step_cost(server.replica, context=context, prompt=prompt)
        if serve.has_draft_model:
            small = replace(server.replica, config=_draft_model(serve, config), stored=None)
            draft = planned_step_cost(small, context=context, prompt=prompt)
    if serve.kv_host_bytes:
        cost = replace(cost, host_block_s=host_block_s(cluster, plan_kv(config, serve, 1 << 62).block_bytes))
    if kv_tokens < serve.block_tokens:
        raise BadInput(f"no KV cache is left beside the weights of {config.name}; raise layout.tp or serve.kv_bytes")
    system = system_of(config, pooled(serve), kv_tokens, cluster.chip.kind, num_stages=recipe.layout.pp)
    if serve.speculate != "none":
        drafting = drafting_of(recipe.fleet.acceptance, serve.max_draft, cost, context, draft)
        system = replace(system, drafting=drafting)
    return FleetCase(
        system=system,
        cost=cost,
        arrivals=arrivals,
        fleet=recipe.fleet,
        autoscale=recipe.autoscale,
        objective=recipe.objective,
        traffic=recipe.traffic,
        usd_per_replica_hour=_price(recipe, cluster, devices),
        transfer_s=moves,
        requests_per_arrival=weight,
    )


def _draft_model(serve: Serve, config: ModelConfig) -> ModelConfig:
    """Shape of the model that drafts: a folder's, or one of the catalogue; a head is one layer."""
    name = serve.draft
    if serve.speculate == "mtp":
        return replace(config, layers=(config.mtp_kind,))
    if (Path(name) / "config.json").is_file():
        return from_hf(read_config(Path(name)), name=Path(name).name)
    return catalogue.model(name).config


def _planned_arrivals(recipe: Recipe, weight: float) -> Sequence[Arrival]:
    """The recipe's requests, each of which stands for `weight`."""
    traffic, ramp_to = recipe.traffic, recipe.load.ramp_to
    fewer = replace(
        traffic,
        requests_per_s=traffic.requests_per_s / weight,
        long_requests_per_s=traffic.long_requests_per_s / weight,
    )
    return arrivals_of(fewer, replace(recipe.load, ramp_to=None if ramp_to is None else ramp_to / weight))


def _thinned(recipe: Recipe) -> float:
    """Requests that an arrival stands for: with curves, more than `_MOST_ARRIVALS` would not say more."""
    if recipe.fleet.simulate == "each" or recipe.load.trace or recipe.load.requests is not None:
        return 1.0
    traffic = recipe.traffic
    mean = (traffic.requests_per_s + (recipe.load.ramp_to or traffic.requests_per_s)) / 2 + traffic.long_requests_per_s
    return max(1.0, mean * traffic.duration_s / _MOST_ARRIVALS)


def _price(recipe: Recipe, cluster: Cluster, devices: int) -> float | None:
    if recipe.hardware.is_here and recipe.cost.usd_per_device_hour is None:
        return None
    try:
        return device_hour(recipe.cost, cluster).usd_per_useful_hour * devices
    except ArmillaryError:
        return None


def replica_limits(case: FleetCase, *, seed: int = 1) -> Limits:
    """The highest Poisson rates at which 99 % of the requests meet the objectives, by bisection with the lengths of the
    case's own requests: of one replica, and of several behind the router, from which that of many follows."""
    objective = case.objective
    if objective == Objective():
        objective = Objective(ttft_p99_s=_UNLIMITED_TTFT * _alone_s(case))
    rate = len(case.arrivals) / max(1e-9, case.arrivals[-1].at_s) if case.arrivals[1:] else 1.0
    alone, in_flight = _highest_rate(case, objective, 1, rate, 0.0, _PROBES, seed)
    if not alone:
        raise BadInput("even a nearly idle replica misses the objectives; relax them, or raise layout.tp")
    pooled_per_s = alone
    if case.autoscale.max_replicas is None or case.autoscale.max_replicas > 1:
        each, in_flight = _highest_rate(case, objective, _POOL, 1.5 * alone, alone, _POOL_PROBES, seed, in_flight)
        pooled_per_s = pooled_rate(alone, each, _POOL)
    return Limits(
        requests_per_s=alone,
        pooled_per_s=pooled_per_s,
        in_flight=in_flight,
        ttft_s=objective.ttft_p99_s,
        itl_s=objective.itl_p99_s,
        usd_per_hour=case.usd_per_replica_hour or 0.0,
    )


def _highest_rate(
    case: FleetCase,
    objective: Objective,
    replicas: int,
    rate: float,
    low: float,
    probes: int,
    seed: int,
    in_flight: float = 1.0,
) -> tuple[float, float]:
    """(requests per second, requests in flight) of each of so many replicas, from `rate` on. It serves `low`, with
    `in_flight`. The simulations last for many times what a request takes: a fleet fills only after a while."""
    high, response_s = (2 * low, in_flight / low) if low else (0.0, 0.0)
    for _ in range(probes):
        count = max(_PROBE_REQUESTS, min(_MOST_PROBE_REQUESTS, ceil(_PROBE_RESPONSES * response_s * rate * replicas)))
        run = _probe(case, rate, replicas, count, seed)
        last_s = max((each.arrived_s for each in run.served), default=0.0)
        full = [each for each in run.served if each.arrived_s >= _FILLS * last_s]
        response_s = fmean(each.end_s - each.arrived_s for each in full) if full else response_s
        if full and sum(met(served, run, objective) for served in full) >= _MET * len(full):
            low, in_flight = rate, max(1.0, response_s * rate)  # Little's law
        else:
            high = rate
        rate = rate * 2 if not high else high / 4 if not low else (low + high) / 2
    return low, in_flight


def _probe(case: FleetCase, rate: float, replicas: int, count: int, seed: int) -> FleetRun:
    """Replicas at a steady rate each, with lengths drawn from the case's requests."""
    poisson = replace(case.traffic, seed=seed, shared_prefix=0, arrival="poisson", long_requests_per_s=0.0)
    traffic = replace(poisson, requests_per_s=rate * replicas)
    lengths = Random(f"probe {seed}").choices(case.arrivals, k=count)
    arrivals = [
        replace(each, tokens_in=lengths_of.tokens_in, tokens_out=lengths_of.tokens_out, limit=lengths_of.limit)
        for each, lengths_of in zip(drawn(traffic, count), lengths, strict=True)
    ]
    fleet = replace(case.fleet, replicas=replicas, failures_per_hour=0.0)
    return SimulatedFleet(arrivals, case.system, case.cost, fleet, seed=seed).run()


def _alone_s(case: FleetCase) -> float:
    """Median TTFT of requests that are alone."""
    sample = [replace(each, number=i + 1, at_s=0.0) for i, each in enumerate(case.arrivals[:31])]
    fleet = replace(case.fleet, replicas=1, failures_per_hour=0.0)
    runs = [SimulatedFleet([each], case.system, case.cost, fleet).run() for each in sample]
    return percentile([each.first_s - each.arrived_s for run in runs for each in run.served], 50)
