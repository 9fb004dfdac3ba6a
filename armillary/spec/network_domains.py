"""Domains of a network in which the nodes of a job are: zones, racks, switches, groups of nodes with one NVLink.

A node's domains are a path from the outermost to the innermost, each written as KIND=NAME: ("zone=a", "rack=7"). They
order the ranks, so that neighbours share a domain, and divide the network of a cluster into tiers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import gcd

from armillary.spec.hardware import Cluster, Tier

Domain = tuple[str, ...]
NVLINK = "nvlink"
"""kind of a domain whose nodes share the link that is inside a node elsewhere"""


def in_domain_order(paths: Sequence[tuple[str, ...]]) -> list[int]:
    """Places of these paths such that those which begin alike are neighbours; domains come as they first appear."""
    first: dict[tuple[str, ...], int] = {}
    for path in paths:
        for depth in range(len(path)):
            first.setdefault(path[: depth + 1], len(first))
    return sorted(
        range(len(paths)), key=lambda place: [first[paths[place][: depth + 1]] for depth in range(len(paths[place]))]
    )


def packed(domains: Sequence[Domain], count: int) -> tuple[Domain, ...]:
    """The domains of `count` of these nodes as a scheduler would choose them: from the largest domains first."""
    sizes = Counter(domain[:depth] for domain in domains for depth in range(len(domain) + 1))

    def largest_first(domain: Domain) -> list[tuple[int, str]]:
        return [(-sizes[domain[: depth + 1]], domain[depth]) for depth in range(len(domain))]

    return tuple(sorted(domains, key=largest_first)[:count])


def with_domains(cluster: Cluster, domains: Sequence[Domain]) -> Cluster:
    """The cluster with its network divided into tiers by the domains of its nodes, one path per node in the order
    of ranks. Domains of different sizes count as groups of their greatest common divisor, which never leave one."""
    outer = cluster.tiers[-1] if cluster.tiers else None
    if outer is None or outer.link.kind != "scale_out" or len(domains) != outer.count:
        return cluster
    tiers, inside = list(cluster.tiers[:-1]), 1
    depth = min(len(domain) for domain in domains)
    for level in reversed(range(depth)):  # the innermost first
        nodes = gcd(*Counter(domain[: level + 1] for domain in domains).values())
        if nodes % inside or not inside < nodes:
            continue
        kinds = {domain[level].partition("=")[0] for domain in domains}
        if len(kinds) == 1 and (nodes < outer.count or kinds == {NVLINK}):  # one domain is the network itself
            tiers, inside = _with_level(tiers, outer, kinds.pop(), nodes // inside), nodes
    rest = outer.count // inside
    return replace(cluster, tiers=(*tiers, *((replace(outer, count=rest),) if rest > 1 else ())))


def _with_level(tiers: list[Tier], outer: Tier, kind: str, count: int) -> list[Tier]:
    if kind == NVLINK and tiers and tiers[-1].link.kind == "scale_up":
        return [*tiers[:-1], replace(tiers[-1], count=tiers[-1].count * count)]
    link = replace(outer.link, name=inner_link(outer.link.name, kind), title=f"{outer.link.title} in a {kind}")
    return [*tiers, replace(outer, link=link, count=count)]


def inner_link(network: str, kind: str) -> str:
    """Name of the network as nodes of one domain see it, under which it is measured."""
    return f"{network} in a {kind}"
