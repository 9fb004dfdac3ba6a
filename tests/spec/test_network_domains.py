"""Nodes in domains of a network: their order, and the tiers of a cluster."""

from __future__ import annotations

import pytest

from armillary.machine.network_domain import network_domain
from armillary.spec import catalogue
from armillary.spec.layout import Layout
from armillary.spec.layout_rules.placement import placement
from armillary.spec.network_domains import Domain, in_domain_order, packed, with_domains

RACKS = [("zone=a", "rack=1"), ("zone=a", "rack=2"), ("zone=a", "rack=1"), ("zone=a", "rack=2")]


def tiers(on: str, domains: list[Domain]) -> list[tuple[int, str]]:
    return [(tier.count, tier.link.kind) for tier in with_domains(catalogue.cluster(on), domains).tiers]


def test_nodes_of_a_domain_become_neighbours() -> None:
    assert in_domain_order(RACKS) == [0, 2, 1, 3]
    assert in_domain_order([("b",), ("a", "x"), ("b",), ("a", "y"), ("a", "x")]) == [0, 2, 1, 4, 3]


@pytest.mark.parametrize(
    ("domains", "expected"),
    [
        (sorted(RACKS), [(8, "scale_up"), (2, "scale_out"), (2, "scale_out")]),
        ([("zone=a",)] * 4, [(8, "scale_up"), (4, "scale_out")]),
        ([("zone=a", "nvlink=1")] * 2 + [("zone=a", "nvlink=2")] * 2, [(16, "scale_up"), (2, "scale_out")]),
        ([("rack=1",)] * 3 + [("rack=2",)], [(8, "scale_up"), (4, "scale_out")]),
        ([("rack=1",)] * 3, [(8, "scale_up"), (4, "scale_out")]),
        ([("rack=1",), ("rack=1",), (), ()], [(8, "scale_up"), (4, "scale_out")]),
        ([], [(8, "scale_up"), (4, "scale_out")]),
    ],
    ids=["two racks", "one zone", "NVLink over two nodes", "uneven", "too few", "half of them unknown", "unknown"],
)
def test_the_tiers_of_a_network(domains: list[Domain], expected: list[tuple[int, str]]) -> None:
    assert tiers("dgx-h100x4", domains) == expected


def test_tensor_parallel_ranks_stay_inside_an_nvlink_of_several_nodes() -> None:
    cluster = with_domains(catalogue.cluster("dgx-h100x4"), [("nvlink=1",)] * 2 + [("nvlink=2",)] * 2)
    (line,) = (line for line in placement(Layout(dp=2, tp=16), cluster) if line.startswith("tp="))
    assert "NVLink" in line and "(16 devices)" in line


def test_a_scheduler_fills_the_largest_domains_first() -> None:
    nodes: list[Domain] = [("rack=1",), *[("rack=2",)] * 3, ("rack=3",)]
    assert packed(nodes, 4) == (("rack=2",), ("rack=2",), ("rack=2",), ("rack=1",))


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        (
            {"SLURM_TOPOLOGY_ADDR": "s0.s3.tux7.lab", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node"},
            ("switch=s0", "switch=s3"),
        ),
        ({"SLURM_TOPOLOGY_ADDR": "tux7", "SLURM_TOPOLOGY_ADDR_PATTERN": "node"}, ()),
        ({"ARMILLARY_NETWORK_DOMAIN": "zone=a/rack=7"}, ("zone=a", "rack=7")),
        ({"ARMILLARY_NETWORK_DOMAINS": "/nowhere"}, ()),
        ({}, ()),
    ],
)
def test_a_node_knows_its_domains(env: dict[str, str], expected: Domain) -> None:
    assert network_domain(env) == expected
