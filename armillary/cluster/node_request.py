"""From a recipe to a job: how many nodes [hardware] states, and how the layout's ranks divide over them."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

from armillary.cluster.excluded_nodes import CHECK_NAME
from armillary.cluster.job import Job, jobs_folder, list_jobs
from armillary.cluster.local import free_port
from armillary.errors import BadInput, BadLayout, BadRecipe
from armillary.spec.hardware import Cluster
from armillary.spec.recipe import Recipe
from armillary.spec.tables.launch_target import TargetName
from armillary.store.home import Home
from armillary.store.runs import check_name, list_runs, new_name, run_names

ELASTIC: tuple[TargetName, ...] = ("local", "ssh", "slurm")
"""targets whose jobs may go on with fewer nodes than they were started with"""


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """The nodes of a job and the ranks on each."""

    count: int
    ranks: int
    gpus: int  # per node; 0 on CPUs

    @property
    def text(self) -> str:
        return f"{self.count} node{'s' * (self.count > 1)} × {self.ranks} rank{'s' * (self.ranks > 1)}"


def parse_range(text: str) -> tuple[int, int]:
    """(least, most) nodes: '4' is (0, 4), all of them always; '2:4' is an elastic run."""
    least, colon, most = text.strip().rpartition(":")
    if not most.isdecimal() or not (least.isdecimal() if colon else least == ""):
        raise BadInput(f"--nodes {text} is no number of nodes; try --nodes 4, or --nodes 2:4")
    if int(most) < 1 or (colon and not 1 <= int(least) <= int(most)):
        raise BadInput(f"--nodes {text} is nothing to run on; try --nodes {f'1:{max(1, int(most))}' if colon else 1}")
    return int(least) if colon else 0, int(most)


def with_nodes(recipe: Recipe, nodes: int) -> Recipe:
    """The recipe for so many nodes of the kind it states."""
    table = recipe.hardware
    if table.is_here:
        return replace(recipe, hardware=replace(table, nodes=nodes))
    node = table.cluster().node
    if table.chip or node is None:
        raise BadRecipe(
            "--nodes needs hardware.on with a known node, like dgx-h200x8; change the counts of hardware.tiers"
        )
    return replace(recipe, hardware=replace(table, on=f"{node.name}x{nodes}"))


def fill_nodes(recipe: Recipe, cluster: Cluster) -> Recipe:
    """The recipe with the dp that uses every device of the cluster; on CPUs, where any number of ranks share the cores,
    so many ranks per node as `launch.ranks_per_node` says, or as the layout divides over the nodes."""
    nodes, layout = cluster.num_nodes, recipe.layout
    per_node = recipe.launch.ranks_per_node or max(1, layout.num_devices // nodes)
    total = nodes * per_node if cluster.chip.kind == "cpu" else cluster.num_devices
    return replace(recipe, layout=layout.on_devices(total))


def nodes_of(recipe: Recipe, cluster: Cluster) -> Nodes:
    """How the recipe's layout divides over the cluster's nodes; fewer are used where it needs fewer."""
    ranks, has_gpus = recipe.layout.num_devices, cluster.chip.kind != "cpu"
    most = cluster.num_nodes
    devices = cluster.num_devices // most
    per_node = recipe.launch.ranks_per_node or (min(ranks, devices) if has_gpus else max(1, ranks // most))
    count = ranks // per_node
    if ranks % per_node or count > most:
        nodes, fits = f"{most} node{'s' * (most > 1)}", max(1, recipe.layout.dp * most * per_node // ranks)
        raise BadLayout(
            f"{recipe.layout.text()} has {ranks} ranks, which {per_node} per node do not place on {nodes}; "
            f"try --nodes {-(-ranks // per_node)} or --set layout.dp={fits}"
        )
    if has_gpus and per_node > devices:
        raise BadLayout(f"{per_node} ranks per node and {devices} devices; try --set launch.ranks_per_node={devices}")
    return Nodes(count=count, ranks=per_node, gpus=per_node if has_gpus else 0)


def make_job(
    recipe: Recipe,
    nodes: Nodes,
    home: Home,
    *,
    target: TargetName,
    name: str = "",
    least: int = 0,
    is_check: bool = False,
) -> Job:
    """The job of a recipe, which is named after its run, or the check of its nodes; with `least` nodes or more its run
    goes on."""
    launch = recipe.launch
    if least and target not in ELASTIC:
        raise BadInput(f"--on {target} has no nodes that come and go; give one number, like --nodes {nodes.count}")
    if target == "local" and launch.port is None:
        launch = replace(launch, port=free_port())
    runs = list_runs(home)
    if name and name not in run_names(runs):
        check_name(name)
    taken = {run.name for run in runs} | {job.name for job in list_jobs(home)}
    name = name or new_name(taken)
    name = CHECK_NAME.format(name) if is_check else name
    own_home = home.work if home.work == home.cache else None
    return Job(
        name=name,
        target=target,
        folder=jobs_folder(home) / name,
        work=Path.cwd(),
        home=own_home,
        num_nodes=nodes.count,
        least_nodes=0 if is_check else least,
        ranks_per_node=nodes.ranks,
        gpus_per_node=nodes.gpus,
        restarts=0 if is_check else recipe.train.max_restarts,
        grace_s=recipe.train.grace_s,
        python=launch.python or ("python3" if launch.image else sys.executable),
        launch=launch,
        is_check=is_check,
    )
