"""The verdict on measured nodes: outliers are named, and healthy ones pass."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest

from armillary.cluster.preflight import judge_probe
from armillary.spec.recipe import recipe_from_dict
from armillary.store.cluster_probe import ClusterProbe, LinkProbe, RankProbe, TwoSizes, best_of
from armillary.store.peaks import new_peaks

NODES = ("a", "a", "b", "b", "c", "c", "d", "d")


def rank(number: int) -> RankProbe:
    wobble = 1 - 0.02 * (number % 3)
    return RankProbe(
        rank=number,
        node=NODES[number],
        device="NVIDIA H100",
        gemm_flops=7e14 * wobble,
        copy_bytes_per_s=2.8e12 * wobble,
        disk_bytes_per_s=2e9 if number % 2 == 0 else None,
        clock_hz=1.98e9,
        versions={"torch": "2.11"},
    )


def link(*ends: int, rate: float = 4e10, axis: str = "replicate") -> LinkProbe:
    apart = len({NODES[end] for end in ends}) > 1
    return LinkProbe(axis=axis, ranks=ends, between_nodes=apart, bytes_per_s=rate, latency_s=1e-5)


EVEN = (0, 2, 4, 6)
HEALTHY = ClusterProbe(
    ranks=tuple(rank(number) for number in range(8)),
    links=(*(link(*pair) for pair in combinations(EVEN, 2)), *(link(n, n + 1, rate=3e11, axis="tp") for n in EVEN)),
    groups=(link(*EVEN), link(1, 3, 5, 7, rate=3.7e10)),
)


def with_rank(number: int, **changes: object) -> ClusterProbe:
    ranks = tuple(replace(each, **changes) if each.rank == number else each for each in HEALTHY.ranks)  # type: ignore[arg-type]
    return replace(HEALTHY, ranks=ranks)


def with_rates(slow: dict[tuple[int, ...], float]) -> ClusterProbe:
    links = tuple(replace(each, bytes_per_s=slow.get(each.ranks, each.bytes_per_s)) for each in HEALTHY.links)
    return replace(HEALTHY, links=links)


def test_healthy_nodes_pass() -> None:
    assert judge_probe(HEALTHY).is_healthy
    assert judge_probe(ClusterProbe(ranks=(rank(0),))).is_healthy, "alone there is nothing to compare with"


def test_a_slow_device_is_named_with_its_node() -> None:
    verdict = judge_probe(with_rank(5, gemm_flops=3e14))
    assert [each.text for each in verdict.outliers] == ["rank 5 on c: GEMM 300 TFLOP/s, the usual is 686 TFLOP/s"]
    assert verdict.excluded == ("c",)
    assert "clock 1.20 GHz" in judge_probe(with_rank(1, clock_hz=1.2e9)).outliers[0].text
    assert judge_probe(with_rank(2, disk_bytes_per_s=1e8)).outliers[0].text.startswith("disk on b: 100 MB/s")


def test_of_two_ranks_the_slower_one_is_the_outlier() -> None:
    two = ClusterProbe(ranks=(rank(0), replace(rank(2), copy_bytes_per_s=1e12)))
    assert judge_probe(two).excluded == ("b",)


def test_a_slow_link_is_named_and_its_slow_node_excluded() -> None:
    (outlier,) = judge_probe(with_rates({(2, 6): 1e10})).outliers
    assert outlier.text.startswith("link between ranks 2 (b), 6 (d), replicate: 10.0 GB/s, the usual is 40.0 GB/s")
    verdict = judge_probe(with_rates({(0, 4): 1e10, (2, 4): 1e10, (4, 6): 1e10}))
    assert len(verdict.outliers) == 3 and verdict.excluded == ("c",), "the node that all slow links share"
    inside = judge_probe(with_rates({(4, 5): 1e11}))
    assert inside.excluded == ("c",), "links inside nodes are compared with each other, not with the network"


def test_a_disturbed_measurement_is_made_good_by_the_next() -> None:
    disturbed, slow = with_rank(5, gemm_flops=3e14), with_rates({(2, 6): 1e10})
    assert judge_probe(best_of(disturbed, HEALTHY)).is_healthy and judge_probe(best_of(slow, HEALTHY)).is_healthy
    assert judge_probe(best_of(disturbed, disturbed)).excluded == ("c",)
    assert judge_probe(best_of(disturbed, slow)).is_healthy


def test_a_disturbed_small_exchange_does_not_make_a_slow_link_fast() -> None:
    def timed(smaller_s: float, larger_s: float) -> ClusterProbe:
        two = TwoSizes(num_bytes=4e7, smaller_s=smaller_s, larger_s=larger_s)
        slow = replace(link(2, 6), timed=two, bytes_per_s=two.bytes_per_s)
        return replace(HEALTHY, links=tuple(slow if each.ranks == (2, 6) else each for each in HEALTHY.links))

    quiet, disturbed = timed(0.001, 0.011), timed(0.0105, 0.011)
    assert not judge_probe(quiet).is_healthy and judge_probe(disturbed).is_healthy
    merged = best_of(quiet, disturbed)
    assert not judge_probe(merged).is_healthy
    assert next(each for each in merged.links if each.ranks == (2, 6)).bytes_per_s == pytest.approx(4e9)


def test_other_versions_are_named() -> None:
    (outlier,) = judge_probe(with_rank(7, versions={"torch": "2.13"})).outliers
    assert outlier.text == "rank 7 on d: torch 2.13, the usual is 2.11" and outlier.nodes == ("d",)


def test_the_network_is_compared_with_the_recipe() -> None:
    cluster = recipe_from_dict({"model": {"name": "gpt2"}}, ["hardware.on=dgx-h100x4"]).cluster()
    slow = replace(HEALTHY, network=link(*EVEN, rate=1e9, axis="nodes"))
    (outlier,) = judge_probe(slow, cluster).outliers
    assert outlier.text.startswith("the network between nodes: 1.00 GB/s, ") and not outlier.nodes
    assert judge_probe(slow).is_healthy, "nobody said what it should have"


def test_the_network_is_that_of_the_outermost_tier() -> None:
    """An all-reduce of all nodes crosses the slow link between racks; the faster one inside them is not its ceiling."""
    cluster = recipe_from_dict({"model": {"name": "gpt2"}}, ["hardware.on=dgx-h100x4"]).cluster()
    network = cluster.tiers[-1]
    assert network.link.kind == "scale_out" and network.bytes_per_s
    slower = replace(network.link, bytes_per_s=network.bytes_per_s / 10)
    racks = replace(cluster, tiers=(*cluster.tiers, replace(network, link=slower, count=2)))
    rate = racks.tiers[-1].bytes_per_s
    assert rate is not None and rate < network.bytes_per_s / 2
    assert judge_probe(replace(HEALTHY, network=link(*EVEN, rate=rate, axis="nodes")), racks).is_healthy


def test_gpus_that_are_all_slow_are_compared_with_what_was_measured_before() -> None:
    point = {"m": 8192, "n": 8192, "k": 8192, "dtype": "bf16", "flops": HEALTHY.ranks[0].gemm_flops}
    before = {HEALTHY.ranks[0].device: new_peaks(HEALTHY.ranks[0].device).with_points("gemm", [point])}
    assert judge_probe(HEALTHY, None, before).is_healthy
    slow = replace(HEALTHY, ranks=tuple(replace(each, gemm_flops=each.gemm_flops / 2) for each in HEALTHY.ranks))
    assert judge_probe(slow).is_healthy, "they are alike"
    verdict = judge_probe(slow, None, before)
    assert len(verdict.outliers) == len(HEALTHY.ranks) and "measured before" in verdict.outliers[0].text
