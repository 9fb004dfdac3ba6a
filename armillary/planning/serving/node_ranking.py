"""Ranking of the catalogue's nodes for serving: which meet the objectives of some traffic, and what tokens cost."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from armillary.errors import ArmillaryError
from armillary.planning.serving.deployment_options import DeploymentOption, Request, best
from armillary.planning.training.node_ranking import different_nodes
from armillary.spec import catalogue
from armillary.spec.hardware import Node

WEIGHTS = ("bf16", "fp8")
"""dtypes of weights with no or almost no loss of quality"""
ENGINES = ("vllm", "sglang", "tensorrt-llm", "neuron", "llama.cpp", "jax", "pytorch")
"""inference software, best known first"""


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
    return sorted((_ranked(request, node) for node in _different()), key=_order)


def _different() -> Iterator[Node]:
    """Nodes that differ inside a replica: chip, number and link, not the network beyond."""
    seen = set()
    for node in different_nodes():
        key = (node.chip, node.num_chips * node.domain, node.link)
        if key not in seen:
            seen.add(key)
            yield node


def _ranked(request: Request, node: Node) -> RankedServing:
    known = catalogue.chips()[node.chip].frameworks
    about = RankedServing(node=node, software=tuple(name for name in ENGINES if name in known))
    try:
        cluster = catalogue.cluster(f"{node.name}x{node.domain}")
        return replace(about, best=best(replace(request, cluster=cluster, measured=None), WEIGHTS))
    except ArmillaryError as error:
        return replace(about, reason=str(error))


def _order(node: RankedServing) -> tuple[bool, bool, float]:
    if node.best is None:
        return True, True, 0.0
    cost = node.best.cost
    return False, cost is None, cost.million_tokens_usd if cost else float(node.best.devices)
