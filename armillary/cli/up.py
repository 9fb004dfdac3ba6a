"""`armillary up`: registry, replicas, gateway and autoscaler of a service on this machine."""

from __future__ import annotations

import sys
import time
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
    from armillary.fleet.autoscale.capacity import Limits
    from armillary.fleet.gateway.gateway_app import Gateway
    from armillary.fleet.gateway.gateway_config import GatewaySettings
    from armillary.fleet.gateway.model_routers import Models
    from armillary.fleet.pool.local_pool import LocalPool
    from armillary.spec.recipe import Recipe

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
    from armillary.fleet.pool.local_pool import LocalPool
    from armillary.serving.http.server import ListenOptions, require_http

    require_http()
    say = partial(click.echo, err=out.mode != "human")
    recipe, settings = read_service(service, overrides)
    name, reference = registered(out, home, recipe)
    folder = home.work / "services" / name
    limits = _limits(home, recipe, say)
    pool = LocalPool(folder / "replicas", _command(home, recipe, folder, name, reference))
    companion = partial(_controlled, pool=pool, recipe=recipe, limits=limits, name=name, folder=folder, say=say)
    keys = KeyFile(home.work / "gateway" / "keys.json")
    listen = ListenOptions(host=host, port=port)
    try:
        run_gateway(_config(name, recipe, settings), listen, keys=keys, folder=folder, say=say, companion=companion)
    finally:
        say("stopping the replicas")
        pool.stop_all(recipe.serve.drain_s + 5.0)


def _render(out: Output, service: Path, overrides: tuple[str, ...], target: str, file: Path | None) -> None:
    """Manifests; the model is loaded by name from where the pods see it."""
    from armillary.cluster.kubernetes.kubernetes_jobs import to_yaml
    from armillary.cluster.kubernetes.service_manifests import KubernetesService, service_manifests
    from armillary.spec.recipe import to_dict
    from armillary.spec.toml.toml_files import dumps
    from armillary.store.atomic import write_text

    recipe, _ = read_service(service, overrides)
    name = recipe.serve.name or Path(recipe.model.source).name.removeprefix("registry:").partition("@")[0]
    own = replace(recipe, serve=replace(recipe.serve, name=name))
    kubernetes = KubernetesService(
        name=name,
        reference=recipe.model.source,
        recipe=recipe,
        replica_recipe=dumps(to_dict(own)),
        gpus=0 if recipe.hardware.is_here else recipe.layout.tp * recipe.layout.pp,
        keda=target == "keda",
    )
    objects = service_manifests(kubernetes)
    path = file or Path(f"{name}.yaml")
    write_text(path, to_yaml(objects))
    out.say(f"wrote {path}: kubectl apply -f {path}; clients use the Service {name}-gateway")
    out.result([each["kind"] for each in objects], quiet=str(path))


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
    from armillary.fleet.autoscale.capacity import Limits
    from armillary.planning.simulation.fleet_case import fleet_case, replica_limits

    try:
        config = model_config(Output("quiet"), home, recipe)
        limits = replica_limits(fleet_case(recipe, config, find_cluster(recipe), home))
        say(f"a replica is planned to serve {limits.requests_per_s:.3g} requests/s within the objectives")
    except ArmillaryError as error:
        rate, objective = recipe.traffic.requests_per_s, recipe.objective
        limits = Limits(
            requests_per_s=rate,
            in_flight=float(recipe.serve.max_running),
            ttft_s=objective.ttft_p99_s,
            itl_s=objective.itl_p99_s,
        )
        say(f"the capacity of a replica is taken as traffic.requests_per_s={rate:g}: {error}")
    return limits


def _config(name: str, recipe: Recipe, settings: GatewaySettings) -> Any:
    from armillary.fleet.gateway.gateway_config import GatewayConfig, ModelSettings

    fleet = recipe.fleet
    model = ModelSettings(name=name, replicas=(), managed=True, max_park_s=fleet.max_wait_s, policy=fleet.policy)
    return GatewayConfig(gateway=settings, models=(model,))


def _command(home: Home, recipe: Recipe, folder: Path, name: str, reference: str) -> Any:
    """Command lines of the replicas; their recipe is written beside them."""
    from armillary.spec.recipe import to_dict
    from armillary.spec.toml.toml_files import dumps
    from armillary.store.atomic import write_text

    own = replace(recipe, serve=replace(recipe.serve, name=name))
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "replica.toml", dumps(to_dict(own)))

    def command(port: int, release: str) -> list[str]:
        return [
            *(sys.executable, "-m", "armillary", "serve", release or reference, "--port", str(port)),
            *("--tp", str(recipe.layout.tp), "--recipe", str(folder / "replica.toml"), "--home", str(home.work)),
        ]

    return command


async def _controlled(
    gateway: Gateway,
    models: Models,
    address: str,
    *,
    pool: LocalPool,
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
    RolloutDriver(controller, models, folder, say)
    objective = to_plain(recipe.objective)
    add_service_page(gateway, lambda: {**controller.plain(), "objective": objective, "now": time.monotonic()})
    say(f"replicas, queue, SLOs and decisions: {address}/")
    await controller.run()
