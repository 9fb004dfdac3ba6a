"""What the pre-flight check measured on the ranks of a job, as check.json in the job's folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from armillary.spec.toml.fields import build, to_plain
from armillary.store import nan_safe_json
from armillary.store.atomic import write_json


@dataclass(frozen=True, kw_only=True)
class RankProbe:
    """One rank's device, alone; the disk is that of the job's folder, and is measured by one rank per node."""

    rank: int
    node: str
    device: str
    gemm_flops: float
    copy_bytes_per_s: float
    disk_bytes_per_s: float | None = None
    clock_hz: float | None = None
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class LinkProbe:
    """Ranks that exchange data along an axis of the layout: two of them in both directions, or the group in an
    all-reduce; `between_nodes` where they are not all on one."""

    axis: str
    ranks: tuple[int, ...]
    between_nodes: bool
    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, kw_only=True)
class ClusterProbe:
    """All of it; `network` is the link between nodes as an all-reduce of one rank per node sees it, `domains` the same
    inside each domain of the network (a rack, a switch), by its kind."""

    ranks: tuple[RankProbe, ...]
    links: tuple[LinkProbe, ...] = ()
    groups: tuple[LinkProbe, ...] = ()
    network: LinkProbe | None = None
    domains: tuple[LinkProbe, ...] = ()
    seconds: float = 0.0


def best_of(first: ClusterProbe, second: ClusterProbe) -> ClusterProbe:
    """The higher rate of two measurements of the same ranks: other work on a machine only makes one slower."""
    ranks = [_faster_rank(*both) for both in zip(first.ranks, second.ranks, strict=True)]
    return replace(
        second,
        ranks=tuple(ranks),
        links=_faster_links(first.links, second.links),
        groups=_faster_links(first.groups, second.groups),
        domains=_faster_links(first.domains, second.domains),
        network=_faster_links([first.network], [second.network])[0] if first.network and second.network else None,
        seconds=first.seconds + second.seconds,
    )


def _faster_rank(first: RankProbe, second: RankProbe) -> RankProbe:
    rates = ("gemm_flops", "copy_bytes_per_s", "disk_bytes_per_s", "clock_hz")
    both = {name: (getattr(first, name), getattr(second, name)) for name in rates}
    best: dict[str, Any] = {name: max(pair) for name, pair in both.items() if None not in pair}
    return replace(second, **best)


def _faster_links(first: Sequence[LinkProbe], second: Sequence[LinkProbe]) -> tuple[LinkProbe, ...]:
    before = {(link.axis, link.ranks): link for link in first}
    both = ((before.get((link.axis, link.ranks), link), link) for link in second)
    return tuple(max(links, key=lambda link: link.bytes_per_s) for links in both)


def write_probe(path: Path, probe: ClusterProbe) -> None:
    write_json(path, to_plain(probe))


def probe_text(probe: ClusterProbe) -> str:
    """What the file would hold, in one line."""
    return nan_safe_json.dumps(to_plain(probe))


def read_probe(path: Path) -> ClusterProbe:
    return build(ClusterProbe, nan_safe_json.read_table(path), path.name)
