"""The run folder of a server: what was asked, what is predicted, and gauges that the engine writes while it serves."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from armillary.errors import ArmillaryError, BadInput
from armillary.spec.hardware import Cluster
from armillary.spec.plan import Plan
from armillary.spec.recipe import Recipe, to_dict
from armillary.spec.tables.serve import Serve
from armillary.spec.tables.traffic import Traffic
from armillary.store.home import Home
from armillary.store.resolve_model import ModelSource
from armillary.store.runs import Run, create_run

if TYPE_CHECKING:
    from armillary.planning.serving.cpu_threads import Threads
    from armillary.profiling.dtypes.choice import Resolved

Say = Callable[[str], None]


@contextmanager
def recorded(home: Home, source: ModelSource, asked: Recipe, *, say: Say, **more: Any) -> Iterator[Run | None]:
    """A run folder for as long as something is served, with what `begin_run` needs; one that cannot be written is no
    reason not to serve."""
    if not asked.model.path and source.folder is not None:
        asked = replace(asked, model=replace(asked.model, name="", path=str(source.folder)))
    try:
        run = begin_run(home, source, asked, **more)
    except (ArmillaryError, OSError) as error:
        say(f"nothing is recorded: {error}")
        yield None
        return
    say(f"run {run.name}: armillary diagnose {run.name} says what holds it back")
    try:
        with run.renewing_lease():
            yield run
    except BaseException as error:
        run.update(state="failed", error=" ".join(str(error).split()))
        raise
    run.update(state="finished")


def begin_run(
    home: Home,
    source: ModelSource,
    recipe: Recipe,
    *,
    dtype: Resolved,
    threads: Threads | None = None,
    text: str = "",
    overrides: tuple[str, ...] = (),
    tp: int = 1,
    device: str | None = None,
) -> Run:
    """A folder for what this server measures, with its plan; ArmillaryError where it cannot be written."""
    from armillary.machine.machine import here

    layout = replace(recipe.layout, tp=tp, pp=recipe.serve.pp, precision=dtype.dtype)
    recipe = replace(recipe, layout=layout)
    tables = {name: table for name, table in to_dict(recipe).items() if name not in ("train", "data")}
    cluster = recipe.cluster(here(device=device))
    has_traffic = recipe.traffic != Traffic()
    predicted, notes = _predicted(home, source, recipe, cluster) if has_traffic else ({}, ())
    why = {"serve.dtype": dtype.reason, "serve.threads": threads.reason if threads else ""}
    plan = Plan(
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        recipe=tables,
        model=source.config,
        cluster=cluster,
        layout=layout,
        serve=replace(recipe.serve, threads=threads.count) if threads is not None else recipe.serve,
        weights=str(source.folder or ""),
        chosen={key: reason for key, reason in why.items() if reason},
        predicted=predicted,
        notes=notes,
    )
    return create_run(home, tables, text=text, overrides=overrides, plan=plan, model=source.config.name)


def _predicted(
    home: Home, source: ModelSource, recipe: Recipe, cluster: Cluster
) -> tuple[dict[str, float], tuple[str, ...]]:
    """One replica at the recipe's traffic, which its scheduler plays; nothing where the planner says that this cannot
    be."""
    from armillary.planning.serving.deployment_options import from_layout
    from armillary.planning.serving.queueing import operating_point
    from armillary.planning.serving.serving_plan import serving_request
    from armillary.planning.simulation.simulated_engine import planned_service

    try:
        request = serving_request(recipe, source.config, cluster, home)
        plan = from_layout(replace(request, objective=type(request.objective)()), recipe.layout).capacity
        if plan is None:
            return {}, ("one server does not bear this traffic",)
        now = operating_point(plan.server, recipe.traffic.total_per_s)
        predicted = replace(plan, replicas=1, actual=now or plan.actual).predicted()
        return predicted | planned_service(plan.server, predicted["kv_capacity_tokens"]), ()
    except ArmillaryError as error:
        return {}, (f"nothing is predicted: {error}",)


def resolve_dtype(home: Home, source: ModelSource, asked: Recipe, device: str | None) -> Resolved:
    """serve.dtype, auto resolved for the device that will serve."""
    from armillary.machine.machine import here
    from armillary.profiling.dtypes.choice import resolve_serving, serving_shape
    from armillary.profiling.dtypes.rates import cluster_rates
    from armillary.store.hf_folder import stored_dtype

    rates = cluster_rates(home, here(device=device), serving_shape(source.config, asked.serve), device=device)
    return resolve_serving(asked.serve, rates, stored=stored_dtype(source.folder), traffic=asked.traffic)


def choose_layout(
    home: Home, source: ModelSource, asked: Recipe, dtype: Resolved, *, devices: int, device: str | None, say: Say
) -> tuple[int, Serve]:
    """(tp, the recipe's [serve] with stages or copies of attention) on so many devices for the recipe's traffic, as the
    planner prices them."""
    copies = asked.serve.dp_attention
    if devices % copies:
        raise BadInput(f"--devices {devices} are not a multiple of serve.dp_attention={copies}; change one of them")
    from armillary.machine.machine import here
    from armillary.planning.serving.engine_layout import engine_layout
    from armillary.planning.serving.serving_plan import serving_request
    from armillary.profiling.dtypes.choice import with_dtype

    layout = replace(asked.layout, precision=dtype.dtype)
    recipe = replace(asked, layout=layout, serve=with_dtype(asked.serve, dtype))
    request = serving_request(recipe, source.config, here(device=device), home)
    chosen, why = engine_layout(request, layout, devices)
    say(f"layout {chosen.text()}: {why}")
    serve = replace(asked.serve, pp=chosen.pp)
    if chosen.copies > copies:  # which were not asked for
        groups = chosen.expert_groups(source.config) or 1
        serve = replace(serve, dp_attention=chosen.copies, ep=serve.ep if serve.ep > 1 else groups)
    return chosen.tp, serve


def resolve_threads(
    home: Home, source: ModelSource, asked: Recipe, dtype: Resolved, *, tp: int, device: str | None, say: Say
) -> Threads | None:
    """serve.threads for a model that a CPU of this machine serves; none where the planner cannot say, as of copies of
    attention, each of which has its part of the cores."""
    from armillary.machine.machine import here
    from armillary.planning.serving.serving_plan import serving_request
    from armillary.profiling.dtypes.choice import with_dtype

    cluster = here(device=device)
    if cluster.chip.kind != "cpu" or asked.serve.dp_attention > 1:
        return None
    recipe = replace(
        asked,
        layout=replace(asked.layout, tp=tp, pp=asked.serve.pp, precision=dtype.dtype),
        serve=with_dtype(asked.serve, dtype),
    )
    longest, traffic = asked.serve.max_model_len or source.config.context, asked.traffic
    # nobody said what is asked of so short a model
    if any(each.tokens_in + each.tokens_out > longest for each in traffic.streams):
        recipe = replace(recipe, traffic=Traffic(tokens_in=max(1, longest // 2), tokens_out=max(1, longest // 4)))
    try:
        return serving_request(recipe, source.config, cluster, home).threads
    except ArmillaryError as error:  # one that it cannot price is served as torch sets itself
        say(f"threads are left to torch: {error}")
        return None
