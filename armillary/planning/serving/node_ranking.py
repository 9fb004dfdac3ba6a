"""Nodes ranked for serving: which machines of the catalogue meet a traffic's objectives, and what tokens then cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from armillary.errors import ArmillaryError
from armillary.planning.serving.deployment_options import Choice, Request, best
from armillary.planning.training.node_ranking import different_nodes
from armillary.spec import catalogue
from armillary.spec.hardware import Node

WEIGHTS = ("bf16", "fp8")
"""formats that lose nothing, or next to nothing"""
ENGINES = ("vllm", "sglang", "tensorrt-llm", "neuron", "llama.cpp", "jax", "pytorch")
"""software that serves, best known first"""


@dataclass(frozen=True, kw_only=True)
class RankedServing:
    """One node of the catalogue, with the cheapest way it serves a traffic."""

    node: Node
    """what would be rented or bought"""
    best: Choice | None = None
    """the cheapest way; none where none meets the objectives"""
    software: tuple[str, ...] = ()
    """engines that run on its chip"""
    reason: str = ""
    """why it will not do"""


def rank_serving(request: Request) -> list[RankedServing]:
    """Every kind of node: those that do first, the cheapest token first, those without a price after them."""
    return sorted((_ranked(request, node) for node in _different()), key=_order)


def _different() -> Iterator[Node]:
    """Nodes that differ in what a replica sees: chip, number and link, not the network beyond."""
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


def _order(one: RankedServing) -> tuple[bool, bool, float]:
    if one.best is None:
        return True, True, 0.0
    cost = one.best.cost
    return False, cost is None, cost.million_tokens_usd if cost else float(one.best.devices)
