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
class TwoSizes:
    """The fastest exchanges of two sizes; their difference leaves out latency."""

    num_bytes: float  # that the larger one moves more
    smaller_s: float
    larger_s: float

    @property
    def bytes_per_s(self) -> float:
        """At most ten times what the larger one moved in its whole time, since the difference of two disturbed
        times may be nothing."""
        return self.num_bytes / max(self.larger_s - self.smaller_s, _LEAST_SHARE * self.larger_s, 1e-9)


_LEAST_SHARE = 0.1


@dataclass(frozen=True, kw_only=True)
class LinkProbe:
    """Ranks that exchange data along an axis of the layout: two of them in both directions, or the group in an
    all-reduce; `between_nodes` where they are not all on one."""

    axis: str
    ranks: tuple[int, ...]
    between_nodes: bool
    bytes_per_s: float
    latency_s: float
    timed: TwoSizes | None = None  # what the rate follows from


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
    """The faster of two measurements of the same ranks: other work on a machine only makes one slower."""
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
    return tuple(_faster_link(before.get((link.axis, link.ranks), link), link) for link in second)


def _faster_link(first: LinkProbe, second: LinkProbe) -> LinkProbe:
    """Of each size the faster time. The higher of two rates would be that of the larger disturbance: a small exchange
    that takes too long makes the difference of both too small."""
    if first.timed is None or second.timed is None:
        return max(first, second, key=lambda link: link.bytes_per_s)
    timed = replace(
        second.timed,
        smaller_s=min(first.timed.smaller_s, second.timed.smaller_s),
        larger_s=min(first.timed.larger_s, second.timed.larger_s),
    )
    latency_s = min(first.latency_s, second.latency_s)
    return replace(second, timed=timed, bytes_per_s=timed.bytes_per_s, latency_s=latency_s)


def write_probe(path: Path, probe: ClusterProbe) -> None:
    write_json(path, to_plain(probe))


def probe_text(probe: ClusterProbe) -> str:
    """What the file would hold, in one line."""
    return nan_safe_json.dumps(to_plain(probe))


def read_probe(path: Path) -> ClusterProbe:
    return build(ClusterProbe, nan_safe_json.read_table(path), path.name)
