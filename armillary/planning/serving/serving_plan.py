"""Serving plan: the chosen way to serve a model, priced, as a Plan that every engine can read."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from armillary.engine.scheduler.settings import check_step_budget
from armillary.errors import ArmillaryError, BadInput
from armillary.planning.device_model.correction import load_correction
from armillary.planning.device_model.measured_peaks import cpu_peaks
from armillary.planning.serving.capacity import Capacity
from armillary.planning.serving.cpu_threads import Threads, engine_threads, peaks_of_threads
from armillary.planning.serving.deployment_options import (
    DeploymentOption,
    Request,
    deployment_options,
    from_layout,
    pools,
    server_of,
)
from armillary.planning.serving.disaggregation import Pools
from armillary.planning.training.resolve_recipe import TrainingProblem, resolve
from armillary.profiling.dtypes.choice import resolve_serving, serving_shape
from armillary.profiling.dtypes.rates import cluster_rates
from armillary.spec.hardware import Cluster
from armillary.spec.layout import Layout, Precision
from armillary.spec.model import ModelConfig
from armillary.spec.plan import Plan
from armillary.spec.recipe import Recipe, to_dict
from armillary.spec.tables.traffic import Traffic
from armillary.spec.toml.fields import to_plain
from armillary.store.home import Home

if TYPE_CHECKING:  # a model of the catalogue has no files to read
    from armillary.store.stored_weights import StoredWeights

_PRECISIONS: dict[str, Precision] = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16", "fp8": "fp8", "fp4": "fp8"}
"""dtype of GEMMs -> precision of a layout; fp4 becomes fp8 and is noted"""


@dataclass(frozen=True, kw_only=True)
class ServingPlan:
    """A plan with everything that a user asks about it."""

    recipe: Recipe
    request: Request
    chosen: DeploymentOption
    tried: tuple[DeploymentOption, ...]
    """every option, best first; the chosen one alone where the recipe has a layout"""
    pools: Pools | None
    """the chosen option with disaggregated pools; None where that is impossible"""
    assumed: tuple[str, ...] = ()

    def plan(self) -> Plan:
        """The record that engines and other verbs read."""
        return Plan(
            created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            recipe=to_dict(self.recipe),
            model=self.request.config,
            cluster=self.request.cluster,
            layout=self.layout(),
            serve=self.capacity.server.serve,
            predicted=self.chosen.predicted(),
            notes=self.notes(),
        )

    def layout(self) -> Layout:
        """Replicas are dp ranks; with ep, the ranks that shard the experts, times the replicas."""
        split = self.chosen.split
        return Layout(
            dp=self.capacity.replicas * split.ep,
            tp=split.tp,
            pp=split.pp,
            ep=split.ep,
            precision=_PRECISIONS[self.chosen.dtypes.compute],
        )

    @property
    def capacity(self) -> Capacity:
        assert self.chosen.capacity is not None, "a refused option is never chosen"
        return self.chosen.capacity

    def notes(self) -> tuple[str, ...]:
        notes, dtypes = list(self.assumed), self.chosen.dtypes
        if self.recipe.traffic == Traffic():
            notes.append(
                "this traffic was assumed; traffic.requests_per_s, traffic.tokens_in and traffic.tokens_out set another"
            )
        needed, available = self.chosen.devices, self.request.cluster.num_devices
        if needed > available:
            notes.append(
                f"{needed} devices are needed and {available} are available; raise --on or relax the objectives"
            )
        if dtypes.weights != dtypes.compute:
            notes.append(f"weights are stored in {dtypes.weights} and computed in {dtypes.compute}")
        if dtypes.weights in ("int4", "fp4"):
            notes.append(
                f"{dtypes.weights} weights can cost quality, which the planner does not model: compare outputs first"
            )
        slowdown = self.capacity.server.serve.prefill_slowdown
        if slowdown != self.request.serve.prefill_slowdown:
            notes.append(
                f"prompts may lengthen a step to {slowdown:g} times its decodes, less than the engine's default: "
                f"--set serve.prefill_slowdown={slowdown:g}"
            )
        return (*notes, *self._budget_notes())

    def _budget_notes(self) -> list[str]:
        serve, asked = self.capacity.server.serve, self.request.serve
        if serve.max_tokens_per_step == asked.max_tokens_per_step:
            return []
        rows = f" --set serve.max_running={serve.max_running}" if serve.max_running != asked.max_running else ""
        return [
            f"step budget lowered to {serve.max_tokens_per_step} tokens, so that prompts add less to the inter-token "
            f"latency: --set serve.max_tokens_per_step={serve.max_tokens_per_step}{rows}"
        ]

    def plain(self) -> dict[str, Any]:
        """For --json."""
        plan = self.plan()
        return {
            "for": "serve",
            "model": plan.model.name,
            "hardware": self.request.cluster.text(),
            "layout": to_plain(plan.layout),
            "formats": to_plain(self.chosen.dtypes),
            "predicted": plan.predicted,
            "highest_requests_per_s": self.capacity.highest.requests_per_s,
            "saturated_tokens_out_per_s": self.capacity.saturated.tokens_out_per_s,
            "cost": to_plain(self.chosen.cost) if self.chosen.cost else None,
            "pools": self._pools_plain(),
            "choices": [_choice_plain(option) for option in self.tried],
            "notes": list(plan.notes),
        }

    def _pools_plain(self) -> dict[str, Any] | None:
        if self.pools is None:
            return None
        return {
            "prefill_replicas": self.pools.prefill.replicas,
            "decode_replicas": self.pools.decode.replicas,
            "devices": self.pools.devices,
            "verdict": self.pools.verdict(self.capacity),
            "predicted": self.pools.predicted(),
        }


def _choice_plain(option: DeploymentOption) -> dict[str, Any]:
    head = {
        "tp": option.split.tp,
        "pp": option.split.pp,
        "ep": option.split.ep,
        "weights": option.dtypes.weights,
        "kv": option.dtypes.kv,
        "reason": option.reason or None,
    }
    if option.capacity is None:
        return head
    return head | {
        "replicas": option.capacity.replicas,
        "devices": option.devices,
        "highest_requests_per_s": option.capacity.highest.requests_per_s,
        "ttft_p99_s": option.capacity.actual.ttft_p99_s,
        "itl_p99_s": option.capacity.actual.itl_p99_s,
        "million_tokens_usd": option.cost.million_tokens_usd if option.cost else None,
    }


def serving_plan(
    recipe: Recipe, config: ModelConfig, cluster: Cluster, home: Home, *, search: bool = False
) -> ServingPlan:
    """The recipe's layout where it has one (unless `search`), else the cheapest option that meets the objectives; with
    measured ceilings of this device if any."""
    if recipe.serve.dp_attention > 1 and config.moe is None:
        raise BadInput(f"{config.name} has no experts, which serve.dp_attention is for; leave it 1")
    problem = resolve(recipe, config, cluster, home, is_corrected=False)
    request = _request(problem, cluster, home)
    if recipe.serve.dp_attention == 1 and (search or not _is_set(recipe.layout)):
        tried = tuple(deployment_options(request))
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
        assumed=(*problem.notes, *([request.correction.note] if request.correction else [])),
    )


def serving_request(
    recipe: Recipe, config: ModelConfig, cluster: Cluster, home: Home, *, is_corrected: bool = True
) -> Request:
    """A recipe's serving problem, on devices as the planner sees them, with the corrections by their engine steps if
    any."""
    problem = resolve(recipe, config, cluster, home, is_corrected=False)
    return _request(problem, cluster, home, is_corrected=is_corrected)


def _request(problem: TrainingProblem, cluster: Cluster, home: Home, *, is_corrected: bool = True) -> Request:
    recipe, measured = problem.recipe, problem.case.measured or problem.case.recorded
    if cluster.chip.kind == "cpu" and cluster.name == "here":  # a server is one process, however many ranks train
        measured, _ = cpu_peaks(home, cluster.chip, cluster.num_devices, 1)
    serve = replace(recipe.serve, dtype=_dtype(problem, cluster, home))
    request = Request(
        config=problem.model,
        cluster=problem.case.cluster,
        serve=serve,
        traffic=recipe.traffic,
        objective=recipe.objective,
        cost=recipe.cost,
        measured=measured,
        stored=_quantized(recipe),
        correction=load_correction(home, problem.case.cluster.chip.name, "serving") if is_corrected else None,
    )
    _refuse_too_long(request)
    check_step_budget(serve.max_tokens_per_step, serve.max_running)
    return _with_threads(request, recipe.layout, home) if cluster.name == "here" else request


def _quantized(recipe: Recipe) -> StoredWeights | None:
    """The files of the recipe's model, where they are a quantized checkpoint on this machine, taken as it is."""
    source = recipe.model.source
    if recipe.model.overrides or not source or not Path(source).exists():
        return None
    from armillary.store.stored_weights import stored_weights

    stored = stored_weights(source)
    return stored if stored is not None and stored.format else None


def _with_threads(request: Request, layout: Layout, home: Home) -> Request:
    """With serve.threads resolved where this machine's CPU serves, and the ceilings of that many threads."""
    threads = _threads(request, layout)
    if threads is None:
        return request
    measured = peaks_of_threads(home, request.measured, threads.count, threads.cores)
    return replace(request, serve=replace(request.serve, threads=threads.count), measured=measured, threads=threads)


def _threads(request: Request, layout: Layout) -> Threads | None:
    if request.cluster.chip.kind != "cpu" or layout.tp > 1 or request.serve.dp_attention > 1:
        return None
    from armillary.machine.cores import compute_threads

    count, cores = request.serve.threads, compute_threads()
    if count is not None:
        return Threads(count=count, cores=cores)
    return engine_threads(
        server_of(request, layout).replica, cores, max(each.tokens_in for each in request.traffic.streams)
    )


def _dtype(problem: TrainingProblem, cluster: Cluster, home: Home) -> Any:
    """serve.dtype, then a layout.precision that the recipe sets, then auto as the engine resolves it; weights that were
    not inspected are taken to be stored in bf16, as most are. Precisions that are no dtype stay with the layout."""
    serve, is_set = problem.recipe.serve, "layout.precision" not in problem.chosen
    if serve.dtype != "auto" or is_set:
        return serve.dtype
    rates = cluster_rates(home, cluster, serving_shape(problem.model, serve))
    return resolve_serving(serve, rates, stored="bf16", traffic=problem.recipe.traffic).dtype


def _is_set(layout: Layout) -> bool:
    """Whether a layout says how to serve, rather than having only defaults."""
    return any(getattr(layout, name) != getattr(Layout(), name) for name in ("tp", "pp", "ep", "precision"))


def _refuse_too_long(request: Request) -> None:
    limit = request.serve.max_model_len or request.config.context
    for key, stream in zip(("tokens_in", "long_tokens_in"), request.traffic.streams, strict=False):
        tokens = stream.tokens_in + stream.tokens_out
        if tokens <= limit:
            continue
        raise BadInput(
            f"requests of {tokens:,} tokens exceed the {limit:,} of {request.config.name}; shorten traffic.{key}"
        )


def _pools(request: Request, chosen: DeploymentOption) -> Pools | None:
    try:
        return pools(request, chosen)
    except ArmillaryError:
        return None  # the objectives leave no time for the KV transfer
