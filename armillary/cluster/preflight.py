"""The verdict on a pre-flight check: which ranks, links and nodes are slower than the others, or have other versions.

A figure is compared with the median of its peers: ranks with the same device, links along the same axis that cross the
network or do not. Two peers have no majority, so the slower one is compared with the faster. A link without peers is
compared with the rate that the recipe's network should have. GPUs are also compared with what one of their kind reached
when it was measured (`armillary bench`), because all of a cluster may be slow.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from armillary.spec.hardware import Cluster
from armillary.store.cluster_probe import ClusterProbe, LinkProbe, RankProbe
from armillary.store.peaks import Peaks
from armillary.units import bytes_text, scaled

SLOW_DEVICE, SLOW_LINK, SLOW_DISK = 0.7, 0.5, 0.2
"""share of the peers' rate below which a device, a link or a disk is an outlier. Chosen, not fitted: a throttled GPU
loses more than a third of its rate, a link that fell back to a lower rate at least half. On 2026-11-18 four gloo ranks
on two cores at a load of 13 passed ten of ten checks, each the best of what was measured within 40 s: the lowest over
the median was 0.66 to 1.00 (GEMM), 0.80 to 0.97 (copies) and 0.50 to 0.92 (links). There a link three times as slow was
not told from the others, one ten times as slow was"""


@dataclass(frozen=True, kw_only=True)
class Outlier:
    """One finding; `nodes` are those to leave out for it, none where that would not help."""

    text: str
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """All outliers, and the nodes to exclude."""

    outliers: tuple[Outlier, ...]

    @property
    def is_healthy(self) -> bool:
        return not self.outliers

    @property
    def excluded(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(node for outlier in self.outliers for node in outlier.nodes))


def judge_probe(
    probe: ClusterProbe, cluster: Cluster | None = None, ceilings: Mapping[str, Peaks] | None = None
) -> Verdict:
    """The verdict on what was measured; `cluster` says what the network should reach, and `ceilings`, by name, what
    devices have reached that a rank has to itself."""
    return Verdict(
        outliers=(
            *_devices(probe.ranks, ceilings or {}),
            *_disks(probe.ranks),
            *_links(probe, probe.links, "link between ranks"),
            *_links(probe, probe.groups, "group of ranks"),
            *_links(probe, probe.domains, "nodes of one"),
            *_network(probe, cluster),
            *_versions(probe.ranks),
        )
    )


def _devices(ranks: Sequence[RankProbe], ceilings: Mapping[str, Peaks]) -> Iterable[Outlier]:
    alike = defaultdict(list)
    for rank in ranks:
        alike[rank.device].append(rank)
    for device, peers in alike.items():
        for field, title, unit in _FIGURES:
            slow = list(_slow_devices(peers, field, title, unit))
            yield from slow or _below_ceiling(peers, field, title, unit, ceilings.get(device))


_FIGURES = (
    ("gemm_flops", "GEMM", "FLOP/s"),
    ("copy_bytes_per_s", "memory bandwidth", "B/s"),
    ("clock_hz", "clock", "Hz"),
)


def _slow_devices(peers: Sequence[RankProbe], field: str, title: str, unit: str) -> Iterable[Outlier]:
    rates = {rank.rank: value for rank in peers if (value := getattr(rank, field)) is not None}
    usual = _usual(list(rates.values())) if rates else 0.0
    for rank in peers:
        rate = rates.get(rank.rank, usual)
        if rate < SLOW_DEVICE * usual:
            text = f"rank {rank.rank} on {rank.node}: {title} {scaled(rate)}{unit}, the usual is {scaled(usual)}{unit}"
            yield Outlier(text=text, nodes=(rank.node,))


def _below_ceiling(
    peers: Sequence[RankProbe], field: str, title: str, unit: str, peaks: Peaks | None
) -> Iterable[Outlier]:
    """Devices that are alike, and slower than one of their kind was."""
    known = {"gemm_flops": peaks.best_gemm("bf16"), "copy_bytes_per_s": peaks.best_copy()} if peaks else {}
    ceiling = known.get(field) or 0.0
    for rank in peers:
        rate = getattr(rank, field) or ceiling
        if rate < SLOW_DEVICE * ceiling:
            measured = f"measured before on {rank.device}: {scaled(ceiling)}{unit}"
            text = f"rank {rank.rank} on {rank.node}: {title} {scaled(rate)}{unit}, {measured}"
            yield Outlier(text=text, nodes=(rank.node,))


def _disks(ranks: Sequence[RankProbe]) -> Iterable[Outlier]:
    rates = {rank.node: rank.disk_bytes_per_s for rank in ranks if rank.disk_bytes_per_s is not None}
    usual = _usual(list(rates.values())) if rates else 0.0
    for node, rate in rates.items():
        if rate < SLOW_DISK * usual:
            yield Outlier(
                text=f"disk on {node}: {bytes_text(rate)}/s, the usual is {bytes_text(usual)}/s", nodes=(node,)
            )


def _links(probe: ClusterProbe, links: Sequence[LinkProbe], what: str) -> Iterable[Outlier]:
    alike = defaultdict(list)
    for link in links:
        alike[link.axis, link.between_nodes, len(link.ranks)].append(link)
    slow = []
    for peers in alike.values():
        usual = _usual([link.bytes_per_s for link in peers])
        slow += [(link, usual) for link in peers if link.bytes_per_s < SLOW_LINK * usual]
    shared = Counter(node for link, _ in slow for node in _nodes(probe, link))
    for link, usual in slow:
        names = ", ".join(f"{rank} ({probe.ranks[rank].node})" for rank in link.ranks)
        text = f"{what} {names}, {link.axis}: {bytes_text(link.bytes_per_s)}/s, the usual is {bytes_text(usual)}/s"
        nodes = sorted(_nodes(probe, link), key=lambda node: shared[node])
        yield Outlier(text=text, nodes=tuple(nodes[-1:]) if len(link.ranks) == 2 else ())


def _nodes(probe: ClusterProbe, link: LinkProbe) -> list[str]:
    return list(dict.fromkeys(probe.ranks[rank].node for rank in link.ranks))


def _network(probe: ClusterProbe, cluster: Cluster | None) -> Iterable[Outlier]:
    """The link between nodes against the recipe's outermost, which an all-reduce of all nodes crosses."""
    tiers = [tier for tier in cluster.tiers if tier.link.kind == "scale_out"] if cluster else []
    if probe.network is None or not tiers or not tiers[-1].bytes_per_s:
        return
    expected, rate = tiers[-1].bytes_per_s, probe.network.bytes_per_s
    if rate < SLOW_LINK * expected:
        title = tiers[-1].link.title
        yield Outlier(text=f"the network between nodes: {bytes_text(rate)}/s, {title} has {bytes_text(expected)}/s")


def _versions(ranks: Sequence[RankProbe]) -> Iterable[Outlier]:
    for name in sorted({name for rank in ranks for name in rank.versions}):
        counts = Counter(rank.versions.get(name, "") for rank in ranks)
        usual = counts.most_common(1)[0][0]
        for rank in ranks:
            if (version := rank.versions.get(name, "")) != usual:
                text = f"rank {rank.rank} on {rank.node}: {name} {version or 'unknown'}, the usual is {usual}"
                yield Outlier(text=text, nodes=(rank.node,))


def _usual(values: Sequence[float]) -> float:
    """The median; of two values the higher."""
    return max(values) if len(values) < 3 else median(values)
