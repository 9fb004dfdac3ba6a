"""A serving plan: the way to serve that was chosen, priced, as a Plan that every engine can read."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

from armillary.errors import ArmillaryError, BadInput
from armillary.planning.device_model.measured_peaks import cpu_peaks
from armillary.planning.serving.deployment_options import Choice, Request, choices, from_layout, pools, server_of
from armillary.planning.serving.disaggregation import Pools
from armillary.planning.serving.threads import Threads, engine_threads, peaks_of_threads
from armillary.planning.training.resolve import TrainingProblem, resolve
from armillary.profiling.dtypes.choice import resolve_serving, serving_shape
from armillary.profiling.dtypes.rates import cluster_rates
from armillary.spec.hardware import Cluster
from armillary.spec.layout import Layout, Precision
from armillary.spec.model import ModelConfig
from armillary.spec.plan import Plan
from armillary.spec.recipe import Recipe, to_dict
from armillary.spec.toml.fields import to_plain
from armillary.store.home import Home

_PRECISIONS: dict[str, Precision] = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16", "fp8": "fp8", "fp4": "fp8"}
"""format of the products -> what a layout can say; fp4 stands beside fp8 and is noted"""


@dataclass(frozen=True, kw_only=True)
class ServingPlan:
    """A plan with everything a person asks about it."""

    recipe: Recipe
    """what was asked"""
    request: Request
    """the same with model and devices found"""
    chosen: Choice
    """how it is served"""
    tried: tuple[Choice, ...]
    """every way that was tried, best first; the chosen one alone where the recipe's layout was taken"""
    pools: Pools | None
    """the same with prompts and tokens apart; none where that cannot be"""
    assumed: tuple[str, ...] = ()
    """what was assumed of the devices"""

    def plan(self) -> Plan:
        """The record that engines and other verbs read."""
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        return Plan(
            created=now,
            recipe=to_dict(self.recipe),
            model=self.request.config,
            cluster=self.request.cluster,
            layout=self.layout(),
            serve=self._serve(),
            predicted=self.chosen.predicted(),
            notes=self.notes(),
        )

    def layout(self) -> Layout:
        """Replicas are dp ranks; with ep they are the ranks that share the experts out, times the copies."""
        split, found = self.chosen.split, self.chosen.capacity
        assert found is not None, "a refused choice is never chosen"
        return Layout(
            dp=found.replicas * split.ep,
            tp=split.tp,
            pp=split.pp,
            ep=split.ep,
            precision=_PRECISIONS[self.chosen.formats.compute],
        )

    def _serve(self) -> Any:
        assert self.chosen.capacity is not None, "a refused choice is never chosen"
        return self.chosen.capacity.server.serve

    def notes(self) -> tuple[str, ...]:
        said, formats = list(self.assumed), self.chosen.formats
        asked, there = self.chosen.devices, self.request.cluster.num_devices
        if asked > there:
            said.append(f"{asked} devices are needed and {there} are there; raise --on or relax the objectives")
        if formats.weights != formats.compute:
            said.append(f"weights are kept in {formats.weights} and computed on in {formats.compute}")
        if formats.weights in ("int4", "fp4"):
            said.append(f"{formats.weights} weights can cost quality, which no planner sees: compare answers first")
        budget, given = self._serve().max_tokens_per_step, self.request.serve.max_tokens_per_step
        if budget != given:
            said.append(
                f"step budget lowered to {budget} tokens, so that prompts lengthen gaps less: "
                f"--set serve.max_tokens_per_step={budget}"
            )
        return tuple(said)

    def plain(self) -> dict[str, Any]:
        """For --json."""
        found = self.plan()
        return {
            "for": "serve",
            "model": found.model.name,
            "hardware": self.request.cluster.text(),
            "layout": to_plain(found.layout),
            "formats": to_plain(self.chosen.formats),
            "predicted": found.predicted,
            "highest_requests_per_s": self.chosen.capacity.highest.requests_per_s if self.chosen.capacity else None,
            "cost": to_plain(self.chosen.cost) if self.chosen.cost else None,
            "pools": self._pools_plain(),
            "choices": [_choice_plain(one) for one in self.tried],
            "notes": list(found.notes),
        }

    def _pools_plain(self) -> dict[str, Any] | None:
        if self.pools is None:
            return None
        return {
            "prefill_replicas": self.pools.prefill.replicas,
            "decode_replicas": self.pools.decode.replicas,
            "devices": self.pools.devices,
            "predicted": self.pools.predicted(),
        }


def _choice_plain(one: Choice) -> dict[str, Any]:
    head = {
        "tp": one.split.tp,
        "pp": one.split.pp,
        "ep": one.split.ep,
        "weights": one.formats.weights,
        "kv": one.formats.kv,
        "reason": one.reason or None,
    }
    if one.capacity is None:
        return head
    return head | {
        "replicas": one.capacity.replicas,
        "devices": one.devices,
        "highest_requests_per_s": one.capacity.highest.requests_per_s,
        "ttft_p99_s": one.capacity.actual.ttft_p99_s,
        "itl_p99_s": one.capacity.actual.itl_p99_s,
        "million_tokens_usd": one.cost.million_tokens_usd if one.cost else None,
    }


def serving_plan(
    recipe: Recipe, config: ModelConfig, cluster: Cluster, home: Home, *, search: bool = False
) -> ServingPlan:
    """The recipe's layout where it says one (unless every way is asked for), else the cheapest way that meets the
    objectives; with the ceilings of this very device where they were measured."""
    made = resolve(recipe, config, cluster, home)
    request = _request(made, cluster, home)
    if search or not _says_how(recipe.layout):
        tried = tuple(choices(request))
    else:
        tried = (from_layout(request, recipe.layout),)
    if tried[0].capacity is None:
        raise BadInput(tried[0].reason)
    return ServingPlan(
        recipe=recipe,
        request=request,
        chosen=tried[0],
        tried=tried,
        pools=_pools(request, tried[0]),
        assumed=made.notes,
    )


def serving_request(recipe: Recipe, config: ModelConfig, cluster: Cluster, home: Home) -> Request:
    """What a recipe asks of serving, on devices as the planner sees them."""
    return _request(resolve(recipe, config, cluster, home), cluster, home)


def _request(made: TrainingProblem, cluster: Cluster, home: Home) -> Request:
    recipe, measured = made.recipe, made.case.measured
    if cluster.chip.kind == "cpu" and cluster.name == "here":  # a server is one process, however many ranks train
        measured, _ = cpu_peaks(home, cluster.chip, cluster.num_devices, 1)
    serve = replace(recipe.serve, dtype=_dtype(made, cluster, home))
    request = Request(
        config=made.model,
        cluster=made.case.cluster,
        serve=serve,
        traffic=recipe.traffic,
        objective=recipe.objective,
        cost=recipe.cost,
        measured=measured,
    )
    _refuse_too_long(request)
    return _with_threads(request, recipe.layout, home) if cluster.name == "here" else request


def _with_threads(request: Request, layout: Layout, home: Home) -> Request:
    """The same with serve.threads resolved where this machine's CPU serves, and the ceilings of so many."""
    found = _threads(request, layout)
    if found is None:
        return request
    measured = peaks_of_threads(home, request.measured, found.count, found.cores)
    return replace(request, serve=replace(request.serve, threads=found.count), measured=measured, threads=found)


def _threads(request: Request, layout: Layout) -> Threads | None:
    if request.cluster.chip.kind != "cpu" or layout.tp > 1:
        return None
    from armillary.machine.cores import compute_threads

    asked, cores = request.serve.threads, compute_threads()
    if asked is not None:
        return Threads(count=asked, cores=cores)
    return engine_threads(server_of(request, layout).replica, cores, request.traffic.tokens_in)


def _dtype(made: TrainingProblem, cluster: Cluster, home: Home) -> Any:
    """serve.dtype, then a layout.precision that a recipe says, then auto as the engine resolves it; weights that nobody
    has looked at yet are taken to be stored in bf16, as most are. Formats that no dtype names stay with the layout."""
    serve, said = made.recipe.serve, "layout.precision" not in made.chosen
    if serve.dtype != "auto" or said:
        return serve.dtype
    rates = cluster_rates(home, cluster, serving_shape(made.model, serve))
    return resolve_serving(serve, rates, stored="bf16", traffic=made.recipe.traffic).dtype


def _says_how(layout: Layout) -> bool:
    """Whether a layout says how to serve, rather than being what a recipe without one has."""
    usual = Layout()
    return any(getattr(layout, name) != getattr(usual, name) for name in ("tp", "pp", "ep", "precision"))


def _refuse_too_long(request: Request) -> None:
    tokens = request.traffic.tokens_in + request.traffic.tokens_out
    if tokens > _longest(request):
        raise BadInput(
            f"requests of {tokens:,} tokens exceed the {_longest(request):,} of {request.config.name}; "
            "shorten traffic.tokens_in"
        )


def _longest(request: Request) -> int:
    return request.serve.max_model_len or request.config.context


def _pools(request: Request, chosen: Choice) -> Pools | None:
    try:
        return pools(request, chosen)
    except ArmillaryError:
        return None  # the objectives leave no room for moving the cache
