"""`--nodes MIN:MAX[@HOST:PORT]`: how many nodes an elastic run has, where they meet, and how many ranks each brings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from armillary.cli.open_model import find_model
from armillary.cli.output import Output
from armillary.errors import BadInput, BadLayout
from armillary.spec.layout_rules.elastic import elastic_layout, ranks_per_replica
from armillary.spec.model import ModelConfig
from armillary.spec.recipe import Recipe
from armillary.store.home import Home

if TYPE_CHECKING:
    from armillary.cli.train.elastic import OpenRun
    from armillary.training.resilience.node_rendezvous import Nodes

_NODES = re.compile(r"(\d+)(?::(\d+))?(?:@([^:@\s]+)(?::(\d+))?)?")


def parse_nodes(text: str) -> Nodes:
    """'3:4', '8', '2:8@node0', '2:8@node0:29400'."""
    from armillary.training.resilience.node_rendezvous import Nodes

    match = _NODES.fullmatch(text.strip())
    if match is None:
        raise BadInput(f"--nodes {text} is no number of nodes; try --nodes 2:4, or --nodes 2:4@HOST:PORT")
    least, most, host, port = match.groups()
    if not 1 <= int(least) <= int(most or least):
        raise BadInput(f"--nodes {text} has no number between its ends; try --nodes 1:{max(1, int(least))}")
    place: dict[str, Any] = {"host": host} if host else {}
    return Nodes(least=int(least), most=int(most or least), **place | ({"port": int(port)} if port else {}))


def train_on_nodes(
    out: Output,
    home: Home,
    recipe: Recipe,
    nodes: str,
    devices: int | None,
    *,
    planning: Mapping[str, Any],
    open_run: OpenRun,
) -> dict[str, Any]:
    """Train as one of several nodes that come and go; `devices` are the ranks of this one."""
    from armillary.cli.train.elastic import ElasticNode

    asked = parse_nodes(nodes)
    if devices is not None and devices < 1:
        raise BadInput(f"--devices {devices} is nothing to train on; give at least 1")
    node = ElasticNode(
        out=out,
        home=home,
        recipe=recipe,
        config=_config(out, home, recipe),
        nodes=asked,
        devices=devices or _devices_here(recipe, planning.get("device"), asked.most),
        planning=planning,
        open_run=open_run,
    )
    return node.train()


def fitted_to(out: Output, home: Home, recipe: Recipe, world: int) -> Recipe:
    """The recipe with as many data-parallel ranks as torchrun has started processes for."""
    layout = elastic_layout(recipe.layout, _config(out, home, recipe), recipe.train, world)
    if layout is None or layout.num_devices != world:
        fits = layout.num_devices if layout is not None else ranks_per_replica(recipe.layout)
        raise BadLayout(f"{world} ranks do not fit {recipe.layout.text()}; start {fits} of them")
    return replace(recipe, layout=layout)


def _config(out: Output, home: Home, recipe: Recipe) -> ModelConfig:
    recipe.model.load_code()
    return recipe.model_config(find_model(out, home, recipe.model.source, need_weights=False).config)


def _devices_here(recipe: Recipe, device: str | None, most_nodes: int) -> int:
    """Ranks of this node where --devices does not say: its GPUs, or on CPUs its share of the recipe's layout."""
    import torch

    gpus = torch.cuda.device_count() if device in (None, "cuda") else 0
    return gpus or max(1, recipe.layout.num_devices // most_nodes)
