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
    point = {"link": outer.link.name, "alpha_s": 3e-5, "bytes_per_s": 2e10}
    save_peaks(home, new_peaks(NETWORK).with_points("link", [point]))
    measured = with_measured_links(home, cluster)
    assert measured.tiers[0] == cluster.tiers[0]
    ring = network(measured).rings[-1]
    assert (ring.bytes_per_s, ring.latency_s) == (2e10, 3e-5), "what collectives reached is no share of a wire"
    assert network(cluster).rings[-1].bytes_per_s == (outer.bytes_per_s or 0) * SCALE_OUT
    one = catalogue.cluster("dgx-h100x1")
    assert with_measured_links(home, one) == one


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
