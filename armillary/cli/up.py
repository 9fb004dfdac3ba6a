"""`armillary up`: registry, replicas, gateway and autoscaler of a service on this machine."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from armillary.cli.output import Output
from armillary.cli.verb_decorator import set_option, verb
from armillary.errors import ArmillaryError, BadInput
from armillary.store.home import Home

if TYPE_CHECKING:
    from armillary.cluster.kubernetes.service_objects import KubernetesService
    from armillary.fleet.autoscale.replica_capacity import Limits
    from armillary.fleet.gateway.gateway_app import Gateway
    from armillary.fleet.gateway.gateway_config import GatewaySettings
    from armillary.fleet.gateway.model_routers import Models
    from armillary.serving.http.server import ListenOptions
    from armillary.spec.recipe import Recipe
    from armillary.spec.replica_pool import Pool

ALIAS = "production"
"""alias of the registry that the replicas follow"""


@verb
@click.argument("service", type=click.Path(path_type=Path))
@click.option("--host", default="127.0.0.1", show_default=True, help="Address of the gateway; 0.0.0.0 for all.")
@click.option("--port", default=9000, show_default=True, type=click.IntRange(0, 65_535), help="0 takes a free one.")
@click.option(
    "--to", "target", type=click.Choice(["here", "kubernetes", "keda"]), default="here", help="Render manifests."
)
@click.option("--out", "file", type=click.Path(path_type=Path, dir_okay=False), help="Of the manifests.  [NAME.yaml]")
@set_option
def up(
    out: Output,
    home: Home,
    service: Path,
    host: str,
    port: int,
    target: str,
    file: Path | None,
    overrides: tuple[str, ...],
) -> None:
    """Run the service of a recipe: its model from the registry, replicas, a gateway and an autoscaler.

    SERVICE has [model], [serve], [objective], [traffic], [fleet], [autoscale], and [gateway] for the gateway's own
    settings. A model that is not in the registry yet is pushed, and replicas follow NAME@production: armillary registry
    promote changes what they serve without dropping a request. Clients use http://HOST:PORT/v1, people look at /.
    Ctrl-C lets requests finish and ends everything. If this process is killed, servers go on for a minute, and the next
    `armillary up` adopts them.

    --to kubernetes writes the same as manifests, with a HorizontalPodAutoscaler; --to keda with a ScaledObject.
    """
    if target != "here":
        return _render(out, service, overrides, target, file)
    from armillary.fleet.gateway.keys import KeyFile
    from armillary.fleet.gateway.run_gateway import run_gateway
    from armillary.serving.http.server import ListenOptions, require_http

    require_http()
    say = partial(click.echo, err=out.mode != "human")
    recipe, settings = read_service(service, overrides)
    if recipe.fleet.prefill_replicas:
        raise BadInput(
            "fleet.prefill_replicas is for armillary simulate; replicas that run do both parts: leave it out"
        )
    on_pods = recipe.fleet.pool == "kubernetes"  # which read the model where their volumes or registry have it
    name, reference = (name_of(recipe), recipe.model.source) if on_pods else registered(out, home, recipe)
    folder = home.work / "services" / name
    limits = _limits(home, recipe, say)
    pool = make_pool(home, recipe, folder, name, reference)
    companion = partial(_controlled, pool=pool, recipe=recipe, limits=limits, name=name, folder=folder, say=say)
    keys = KeyFile(home.work / "gateway" / "keys.json")
    listen = ListenOptions(host=host, port=port)
    with backed(recipe, settings, listen, folder, say) as settings:
        config = _config(name, recipe, settings)
        try:
            run_gateway(config, listen, keys=keys, folder=folder, say=say, companion=companion)
        finally:
            say("stopping the replicas")
            pool.stop_all(recipe.serve.drain_s + 5.0)


@contextmanager
def backed(
    recipe: Recipe, settings: GatewaySettings, listen: ListenOptions, folder: Path, say: Any
) -> Iterator[GatewaySettings]:
    """Redis and nginx of the service's own, where the recipe wants them; the gateway's settings with them."""
    from armillary.fleet.gateway.nginx_config import config_before
    from armillary.fleet.pool.backing_services import nginx_server, redis_server

    fleet = recipe.fleet
    with ExitStack() as running:
        if fleet.redis:
            if settings.redis:
                raise BadInput("fleet.redis starts a Redis, and gateway.redis names another; leave one of them out")
            settings = replace(settings, redis=running.enter_context(redis_server(folder / "redis")))
            say(f"limits are kept in {settings.redis}, with its data in {folder / 'redis'}")
        if fleet.nginx_port is not None:
            if not listen.port:
                raise BadInput("fleet.nginx_port needs a gateway on a fixed port; give --port")
            config = config_before(settings, listen.host, listen.port, port=fleet.nginx_port)
            running.enter_context(nginx_server(folder / "nginx", fleet.nginx_port, config))
            say(f"clients may use http://127.0.0.1:{fleet.nginx_port}/v1, where nginx listens on every address")
        yield settings


def _render(out: Output, service: Path, overrides: tuple[str, ...], target: str, file: Path | None) -> None:
    """Manifests; the model is loaded by name from where the pods see it."""
    from armillary.cluster.kubernetes.kubernetes_jobs import to_yaml
    from armillary.cluster.kubernetes.service_manifests import service_manifests
    from armillary.store.atomic import write_text

    recipe, settings = read_service(service, overrides)
    name = name_of(recipe)
    kubernetes = on_kubernetes(recipe, name, recipe.model.source)
    objects = service_manifests(replace(kubernetes, keda=target == "keda", gateway=_given(settings)))
    path = file or Path(f"{name}.yaml")
    write_text(path, to_yaml(objects))
    out.say(f"wrote {path}: kubectl apply -f {path}; clients use the Service {name}-gateway")
    out.result([each["kind"] for each in objects], quiet=str(path))


def name_of(recipe: Recipe) -> str:
    """What clients call the model, by the recipe alone."""
    return recipe.serve.name or Path(recipe.model.source).name.removeprefix("registry:").partition("@")[0]


def on_kubernetes(recipe: Recipe, name: str, reference: str) -> KubernetesService:
    """What its manifests are rendered from."""
    from armillary.cluster.kubernetes.service_objects import KubernetesService

    return KubernetesService(
        name=name,
        reference=reference,
        recipe=recipe,
        replica_recipe=_replica_recipe(recipe, name),
        gpus=_gpus(recipe),
    )


def _given(settings: GatewaySettings) -> dict[str, Any]:
    """The settings of the recipe's [gateway] that are not defaults."""
    from armillary.spec.toml.fields import to_plain

    usual = to_plain(type(settings)())
    return {name: value for name, value in to_plain(settings).items() if value != usual[name]}


def _gpus(recipe: Recipe) -> int:
    """Of a replica; none where the recipe is for this machine, which says by itself what it has."""
    return 0 if recipe.hardware.is_here else recipe.layout.tp * recipe.layout.pp * recipe.serve.dp_attention


def _replica_recipe(recipe: Recipe, name: str) -> str:
    from armillary.spec.recipe import to_dict
    from armillary.spec.toml.toml_files import dumps

    return dumps(to_dict(replace(recipe, serve=replace(recipe.serve, name=name))))


def read_service(file: Path, overrides: tuple[str, ...]) -> tuple[Recipe, GatewaySettings]:
    """A service's file: a recipe with one more table."""
    from armillary.fleet.gateway.gateway_config import GatewaySettings
    from armillary.spec.recipe import read_tables, recipe_from_dict
    from armillary.spec.toml.fields import build

    tables = read_tables(file)
    gateway = build(GatewaySettings, tables.pop("gateway", {}), "gateway")
    return recipe_from_dict(tables, overrides), gateway


def registered(out: Output, home: Home, recipe: Recipe) -> tuple[str, str]:
    """(name for clients, registry:NAME@ALIAS); a model that is elsewhere is pushed, if its files are not there yet."""
    from armillary.cli.open_model import find_model
    from armillary.store.registry.open_registry import open_registry

    source = recipe.model.source
    if recipe.serve.emulate:
        return recipe.serve.name or Path(source).name, str(Path(source).absolute())
    if source.startswith("registry:"):
        return recipe.serve.name or source.removeprefix("registry:").partition("@")[0].partition(":")[0], source
    origin = find_model(out, home, source, need_weights=True)
    if origin.folder is None:
        raise BadInput(f"{source} has no weights on this machine; name a folder, a run or registry:NAME@ALIAS")
    store, name = open_registry(home), recipe.serve.name or origin.name
    if not store.versions(name):
        release = store.push(name, origin.folder, note=f"by armillary up from {source}")
        store.promote(release.text, ALIAS)
        out.say(f"{release.text} is in the registry and {ALIAS}")
    elif ALIAS not in store.aliases(name):
        raise BadInput(f"{name} is in the registry without {ALIAS}; try armillary registry promote {name} {ALIAS}")
    return name, f"registry:{name}@{ALIAS}"


def _limits(home: Home, recipe: Recipe, say: Any) -> Limits | None:
    """Capacity of a replica by simulation; None without an autoscaler. Where it cannot be predicted, one replica is
    taken to serve the recipe's traffic until measurements correct that."""
    if not recipe.autoscale.is_on:
        return None
    from armillary.cli.plan.options import find_cluster, model_config
    from armillary.fleet.autoscale.replica_capacity import Limits
    from armillary.planning.simulation.fleet_case import fleet_case, replica_limits

    try:
        config = model_config(Output("quiet"), home, recipe)
        limits = replica_limits(fleet_case(recipe, config, find_cluster(recipe), home))
        say(f"a replica is planned to serve {limits.requests_per_s:.3g} requests/s within the objectives")
    except ArmillaryError as error:
        rate, objective = recipe.traffic.total_per_s, recipe.objective
        limits = Limits(
            requests_per_s=rate,
            in_flight=float(recipe.serve.max_running),
            ttft_s=objective.ttft_p99_s,
            itl_s=objective.itl_p99_s,
        )
        say(f"the capacity of a replica is taken as the {rate:g} requests/s of [traffic]: {error}")
    return limits


def _config(name: str, recipe: Recipe, settings: GatewaySettings) -> Any:
    from armillary.fleet.gateway.gateway_config import GatewayConfig, ModelSettings

    fleet = recipe.fleet
    model = ModelSettings(name=name, replicas=(), managed=True, max_park_s=fleet.max_wait_s, policy=fleet.policy)
    return GatewayConfig(gateway=settings, models=(model,))


def make_pool(home: Home, recipe: Recipe, folder: Path, name: str, reference: str) -> Pool:
    """Where the replicas run, by fleet.pool; their recipe is written into the service's folder."""
    from armillary.store.atomic import write_text

    if recipe.fleet.pool == "kubernetes":
        from armillary.cluster.kubernetes.api import Cluster
        from armillary.cluster.kubernetes.kubernetes_pool import KubernetesPool
        from armillary.cluster.kubernetes.service_manifests import pool_manifests

        config, deployment = pool_manifests(on_kubernetes(recipe, name, recipe.model.source))
        return KubernetesPool(Cluster(recipe.launch.namespace), config, deployment)
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "replica.toml", _replica_recipe(recipe, name))

    def serve(release: str) -> list[str]:
        return [
            *(sys.executable, "-m", "armillary", "serve", release or reference, "--tp", str(recipe.layout.tp)),
            *("--recipe", str(folder / "replica.toml"), "--home", str(home.work)),
        ]

    if recipe.fleet.pool == "ray":
        from armillary.cluster.ray.serve_pool import ServePool

        return ServePool(
            folder / "replicas",
            f"{name}-replica",
            serve,
            address=recipe.launch.address,
            gpus=_gpus(recipe),
            cpus=float(recipe.launch.cpus_per_node or 1),
            environment=dict(recipe.launch.environment),
            drain_s=recipe.serve.drain_s,
        )
    from armillary.fleet.pool.local_pool import LocalPool

    return LocalPool(folder / "replicas", lambda port, release: [*serve(release), "--port", str(port)])


async def _controlled(
    gateway: Gateway,
    models: Models,
    address: str,
    *,
    pool: Pool,
    recipe: Recipe,
    limits: Limits | None,
    name: str,
    folder: Path,
    say: Any,
) -> None:
    from armillary.fleet.autoscale.controller import Controller
    from armillary.fleet.autoscale.policy import Autoscaler
    from armillary.fleet.autoscale.service_page import add_service_page
    from armillary.fleet.rollout.rollout_driver import RolloutDriver
    from armillary.fleet.rollout.rollout_record import read_rollout
    from armillary.spec.toml.fields import to_plain

    scaler = None
    if limits is not None:
        scaler = Autoscaler(recipe.autoscale, limits, start_s=recipe.fleet.start_s)
    controller = Controller(
        pool,
        gateway,
        models,
        model=name,
        served=name,
        target=max(recipe.fleet.replicas, recipe.autoscale.min_replicas if scaler else 0),
        autoscaler=scaler,
        log=folder / "decisions.jsonl",
        say=say,
    )
    driver = RolloutDriver(controller, models, folder, say)
    objective = to_plain(recipe.objective)

    def state() -> dict[str, Any]:
        rollout = read_rollout(folder)
        shown = None if rollout is None else {**to_plain(rollout), "progress": driver.progress}
        return {**controller.plain(), "objective": objective, "rollout": shown, "now": time.monotonic()}

    add_service_page(gateway, state)
    say(f"replicas, queue, SLOs and decisions: {address}/")
    await controller.run()
