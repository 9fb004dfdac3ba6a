"""Ranking of the catalogue's nodes: which fit a training job or meet the objectives of some traffic, and their cost."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil

from armillary.errors import ArmillaryError
from armillary.planning.cost.cost import device_hour, training_cost
from armillary.planning.serving.deployment_options import DeploymentOption, Request, best
from armillary.planning.training.layout_prediction import Prediction
from armillary.planning.training.search import Counted, fastest
from armillary.planning.training.train_case import TrainCase
from armillary.spec import catalogue
from armillary.spec.hardware import Cluster, Node
from armillary.spec.tables.traffic import Cost

KINDS = ("gpu", "tpu", "npu")
WEIGHTS = ("bf16", "fp8")
"""dtypes of served weights with no or almost no loss of quality"""
ENGINES = ("vllm", "sglang", "tensorrt-llm", "neuron", "llama.cpp", "jax", "pytorch")
"""inference software, best known first"""


def _different_nodes(*, by_network: bool) -> list[Node]:
    """Nodes of accelerators that differ in chip, number and link; and, if `by_network`, in the network beyond."""
    nodes: dict[tuple[object, ...], Node] = {}
    for node in catalogue.nodes().values():
        if catalogue.chips()[node.chip].kind in KINDS:
            network = (node.network, node.oversubscription) if by_network else ()
            nodes.setdefault((node.chip, node.num_chips * node.domain, node.link, *network), node)
    return list(nodes.values())


# --- training


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """One node of the catalogue and as many of it as requested, with its best layout for a job, or why nothing fits."""

    node: Node
    cluster: Cluster | None = None
    best: Prediction | None = None
    """the fastest layout; None where nothing fits"""
    run_s: float | None = None
    run_usd: float | None = None
    """cost of the run; None where no price is known"""
    frameworks: tuple[str, ...] = ()
    reason: str = ""


Watch = Callable[[int, int, str], None]
"""called with the nodes done, the number of nodes, and the current one"""


def rank_nodes(
    case: TrainCase, *, devices: int, steps: int, cost: Cost, watch: Watch = lambda done, total, what: None
) -> list[Ranked]:
    """Every kind of node with about `devices` chips: those that fit first, cheapest run first, then fastest."""
    nodes, ranked = _different_nodes(by_network=True), []
    counted: Counted = {}
    for i, node in enumerate(nodes):
        watch(i, len(nodes), node.name)
        ranked.append(_ranked(case, node, devices, steps, cost, counted))
    watch(len(nodes), len(nodes), "")
    return sorted(ranked, key=_order)


def _order(node: Ranked) -> tuple[bool, float, float]:
    return node.best is None, node.run_usd if node.run_usd is not None else 1e30, node.run_s or 1e30


def _ranked(case: TrainCase, node: Node, devices: int, steps: int, cost: Cost, counted: Counted) -> Ranked:
    about = Ranked(node=node, frameworks=catalogue.chips()[node.chip].frameworks)
    try:
        cluster = _cluster(node, devices)
        best = fastest(replace(case, cluster=cluster, measured=None, recorded=None, correction=None), counted)
    except ArmillaryError as error:
        return replace(about, reason=str(error))
    seconds = float(best.time.total[0])
    return replace(
        about, cluster=cluster, best=best, run_s=seconds * steps, run_usd=_dollars(case, cluster, seconds, steps, cost)
    )


def _cluster(node: Node, devices: int) -> Cluster:
    """Full nodes, and full scale-up domains where there is more than one."""
    count = max(1, ceil(devices / node.num_chips))
    if count > node.domain:
        count = ceil(count / node.domain) * node.domain
    return catalogue.cluster(f"{node.name}x{count}")


def _dollars(case: TrainCase, cluster: Cluster, step_s: float, steps: int, cost: Cost) -> float | None:
    try:
        offer = device_hour(cost, cluster)
    except ArmillaryError:
        return None
    return training_cost(
        step_s=step_s,
        batch_tokens=case.batch_tokens,
        steps=steps,
        num_devices=cluster.num_devices,
        usd_per_device_hour=offer.usd_per_hour,
    ).run_usd


# --- serving


@dataclass(frozen=True, kw_only=True)
class RankedServing:
    """One node of the catalogue, with its cheapest deployment for some traffic."""

    node: Node
    best: DeploymentOption | None = None
    """the cheapest option; None where none meets the objectives"""
    software: tuple[str, ...] = ()
    reason: str = ""


def rank_serving(request: Request) -> list[RankedServing]:
    """Every kind of node: the possible ones first, the cheapest tokens first, those without a price last."""
    nodes = _different_nodes(by_network=False)  # a replica uses no network beyond its nodes
    return sorted((_ranked_serving(request, node) for node in nodes), key=_serving_order)


def _ranked_serving(request: Request, node: Node) -> RankedServing:
    known = catalogue.chips()[node.chip].frameworks
    about = RankedServing(node=node, software=tuple(name for name in ENGINES if name in known))
    try:
        cluster = catalogue.cluster(f"{node.name}x{node.domain}")
        return replace(about, best=best(replace(request, cluster=cluster, measured=None), WEIGHTS))
    except ArmillaryError as error:
        return replace(about, reason=str(error))


def _serving_order(node: RankedServing) -> tuple[bool, bool, float]:
    if node.best is None:
        return True, True, 0.0
    cost = node.best.cost
    return False, cost is None, cost.million_tokens_usd if cost else float(node.best.devices)
