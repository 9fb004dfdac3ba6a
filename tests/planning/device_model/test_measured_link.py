"""The link between nodes as a pre-flight check measured it, in place of the catalogue's."""

from __future__ import annotations

from pathlib import Path

from armillary.planning.device_model.measured_peaks import with_measured_links
from armillary.planning.device_model.network import SCALE_OUT, network
from armillary.spec import catalogue
from armillary.store.home import Home
from armillary.store.peaks import NETWORK, new_peaks, save_peaks


def test_a_measured_link_replaces_the_catalogue_s(tmp_path: Path) -> None:
    home, cluster = Home.at(tmp_path), catalogue.cluster("dgx-h100x4")
    outer = cluster.tiers[-1]
    assert with_measured_links(home, cluster) == cluster
    point = {"link": outer.link.name, "alpha_s": 3e-5, "bytes_per_s": 2e10, "beside": {"date": "2026-11-17"}}
    save_peaks(home, new_peaks(NETWORK).with_points("link", [point]))
    measured = with_measured_links(home, cluster)
    assert measured.tiers[0] == cluster.tiers[0]
    ring = network(measured).rings[-1]
    assert (ring.bytes_per_s, ring.latency_s) == (2e10, 3e-5), "what collectives reached is no share of a wire"
    assert network(cluster).rings[-1].bytes_per_s == (outer.bytes_per_s or 0) * SCALE_OUT
    assert "check of 2026-11-17" in measured.tiers[-1].link.source
    other = {"link": outer.link.name, "chip": "cpu", "alpha_s": 1e-3, "bytes_per_s": 1e6}
    save_peaks(home, new_peaks(NETWORK).with_points("link", [other]))
    assert with_measured_links(home, cluster) == measured, "measured between nodes of another kind"
    one = catalogue.cluster("dgx-h100x1")
    assert with_measured_links(home, one) == one


def test_links_inside_a_domain_are_measured_apart(tmp_path: Path) -> None:
    """Four nodes in two racks: what the check measured inside a rack and between them are two tiers of the plan."""
    from armillary.cli.launch.check import keep_links
    from armillary.spec.network_domains import with_domains
    from armillary.store.cluster_probe import ClusterProbe, LinkProbe, RankProbe

    home, cluster = Home.at(tmp_path), catalogue.cluster("dgx-h100x4")
    ranks = [RankProbe(rank=n, node=f"n{n // 8}", device="", gemm_flops=1, copy_bytes_per_s=1) for n in range(32)]

    def link(axis: str, *members: int, rate: float, apart: bool = True) -> LinkProbe:
        return LinkProbe(axis=axis, ranks=members, between_nodes=apart, bytes_per_s=rate, latency_s=2e-5)

    probe = ClusterProbe(
        ranks=tuple(ranks),
        groups=(link("tp", *range(8), rate=3e11, apart=False), link("replicate", 0, 8, 16, 24, rate=9e9)),
        network=link("nodes", 0, 8, 16, 24, rate=1e10),
        domains=(link("rack", 0, 16, rate=4e10), link("rack", 8, 24, rate=3e10)),
    )
    keep_links(home, probe, cluster)
    racks = with_domains(cluster, [("zone=a", "rack=1")] * 2 + [("zone=a", "rack=2")] * 2)
    rings = network(with_measured_links(home, racks)).rings
    assert [(ring.reach, ring.bytes_per_s) for ring in rings] == [(8, 3e11), (16, 3e10), (32, 1e10)]


def test_a_network_between_single_devices_is_not_this_machine_s_memory() -> None:
    """Collectives measured on this machine say nothing of a network, even where it is the innermost tier."""
    from armillary.spec.hardware import Cluster
    from armillary.spec.recipe import recipe_from_dict
    from tests.cluster.test_node_request import CORE

    fast = new_peaks("core").with_points(
        "collective", [{"op": "all_reduce", "world": 2, "alpha_s": 1e-6, "bytes_per_s": 1e12}]
    )
    recipe = recipe_from_dict({"model": {"name": "gpt2"}, "hardware": {"nodes": 2, "network": "ethernet-10g"}})
    pair = recipe.cluster(Cluster(name="here", chip=CORE))
    assert network(pair, fast).rings[0].bytes_per_s < 2e9
