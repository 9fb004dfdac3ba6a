"""Ranking of the catalogue's nodes for a training job: which fit it, how fast they are and what they cost."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import ceil

from armillary.errors import ArmillaryError
from armillary.planning.cost.cost import device_hour, training_cost
from armillary.planning.training.prediction import Prediction
from armillary.planning.training.search import search
from armillary.planning.training.train_case import TrainCase
from armillary.spec import catalogue
from armillary.spec.hardware import Cluster, Node
from armillary.spec.tables.serve import Cost

KINDS = ("gpu", "tpu", "npu")


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
    nodes, ranked = list(different_nodes()), []
    for i, node in enumerate(nodes):
        watch(i, len(nodes), node.name)
        ranked.append(_ranked(case, node, devices, steps, cost))
    watch(len(nodes), len(nodes), "")
    return sorted(ranked, key=_order)


def _order(node: Ranked) -> tuple[bool, float, float]:
    return node.best is None, node.run_usd if node.run_usd is not None else 1e30, node.run_s or 1e30


def different_nodes() -> Iterator[Node]:
    """Nodes of accelerators that differ in what a training step depends on."""
    seen = set()
    for node in catalogue.nodes().values():
        key = (node.chip, node.num_chips * node.domain, node.link, node.network, node.oversubscription)
        if key not in seen and catalogue.chips()[node.chip].kind in KINDS:
            seen.add(key)
            yield node


def _ranked(case: TrainCase, node: Node, devices: int, steps: int, cost: Cost) -> Ranked:
    about = Ranked(node=node, frameworks=catalogue.chips()[node.chip].frameworks)
    try:
        cluster = _cluster(node, devices)
        best = search(replace(case, cluster=cluster, measured=None), shown=1).best
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
