"""Collective times on nested network tiers, from the links they cross.

A ring is limited by the slowest tier: each byte enters every unit of a tier once, over the links of all members inside
(Thakur et al. 2005; Patarasuk & Yuan 2009). Every step of the ring adds a latency.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from armillary.planning.device_model.vectorised_layouts import Array, Ints
from armillary.spec.arithmetic.non_gemm_ops import Collective, wire_factor
from armillary.spec.hardware import Cluster, Tier

if TYPE_CHECKING:  # the store's locks and sockets are slow to import
    from armillary.store.peaks import Peaks

SCALE_UP, SCALE_OUT = 0.80, 0.88
"""share of a link's rate that large messages reach: NCCL over NVLink, over InfiniBand or RoCE"""
UNKNOWN_BYTES_PER_S, UNKNOWN_LATENCY_S = 5e9, 20e-6
"""bytes/s and latency of a link that is unknown: slow enough to be noticed, and mentioned in the notes"""


@dataclass(frozen=True, kw_only=True)
class Ring:
    """One tier as a collective sees it."""

    reach: int
    """devices inside one unit of the tier above, this tier included"""
    bytes_per_s: float
    """achieved bytes/s of one device's link into this tier"""
    latency_s: float
    reduces: bool = False
    """its switch adds what it forwards, so that an all-reduce inside sends its array once and receives it once"""


@dataclass(frozen=True, kw_only=True)
class Network:
    """The tiers of a cluster, innermost first."""

    rings: tuple[Ring, ...]

    def ring_s(self, kind: Collective, num_bytes: npt.ArrayLike, members: Ints, stride: Ints) -> Array:
        """Seconds to gather, scatter or reduce an array of `num_bytes` among `members` ranks `stride` apart: the
        slowest tier's bytes·(n−1)/n ÷ (links·rate), twice for an all-reduce, and a latency per step. Inside a domain
        whose switches reduce, an all-reduce moves bytes·(n+1)/n."""
        size = np.asarray(num_bytes, dtype=float)
        worst = np.zeros(np.broadcast_shapes(size.shape, members.shape))
        steps = np.zeros_like(worst)
        inside = np.ones_like(members)  # members inside one unit of the tier below
        for ring in self.rings:
            within = np.clip(ring.reach // np.maximum(stride, 1), 1, members)
            units = np.maximum(members / inside, 1.0) if ring is self.rings[-1] else np.maximum(within / inside, 1.0)
            worst = np.maximum(worst, size * (units - 1) / units / (inside * ring.bytes_per_s))
            steps = steps + (units - 1) * ring.latency_s
            inside = np.maximum(within, 1)
        return np.where(members > 1, self._passes(kind, members, stride) * (worst + steps), 0.0)

    def _passes(self, kind: Collective, members: Ints, stride: Ints) -> Array | float:
        """How often a collective passes a ring."""
        if kind != "all_reduce" or not self.rings or not self.rings[0].reduces:
            return 2.0 if kind == "all_reduce" else 1.0
        reduced = np.minimum(2.0, (members + 1) / np.maximum(members - 1, 1))
        return np.where(members * stride <= self.rings[0].reach, reduced, 2.0)

    def gather_s(self, num_bytes: npt.ArrayLike, members: Ints, stride: Ints) -> Array:
        """All-gather or reduce-scatter of an array of `num_bytes`."""
        return self.ring_s("all_gather", num_bytes, members, stride)

    def flat_s(self, num_bytes: npt.ArrayLike, members: Ints, stride: Ints) -> Array:
        """The same without forwarding: every byte comes over the rank's own link of the tier it crosses."""
        return self.all_to_all_s(np.asarray(num_bytes, dtype=float), members, stride)

    def all_to_all_s(
        self,
        num_bytes: npt.ArrayLike,
        members: Ints,
        stride: Ints,
        copies: float | None = None,
        reach: tuple[int, int] = (1, 1),
    ) -> Array:
        """Each rank sends `num_bytes`·(n−1)/n, each part over the tier of its target; tiers work in parallel. Where the
        bytes are `copies` of the same rows, a row is sent once to each of u units (devices inside a node, nodes
        beyond) that holds one of its k experts: u·(1−(1−1/u)^k)/k of them (DeepEP, HybridEP); fewer where a row may
        `reach` only some of the groups of experts (DeepSeek-V3, arXiv 2412.19437, section 2.1.2)."""
        size = np.asarray(num_bytes, dtype=float)
        worst = np.zeros(np.broadcast_shapes(size.shape, members.shape))
        latency = np.zeros_like(worst)
        inside = np.ones_like(members)
        for ring in self.rings:
            within = np.clip(ring.reach // np.maximum(stride, 1), 1, members)
            within = members if ring is self.rings[-1] else within
            units = np.maximum(members / inside, 1.0)
            once = distinct_units(units, copies, *reach) / copies if copies else 1.0
            worst = np.maximum(worst, size * once * (within - inside) / members / ring.bytes_per_s)
            latency = np.where(within > inside, ring.latency_s * np.log2(np.maximum(members, 2)), latency)
            inside = within
        return np.where(members > 1, worst + latency, 0.0)

    def send_s(self, num_bytes: npt.ArrayLike, stride: Ints) -> Array:
        """Point to point between ranks `stride` apart."""
        size = np.asarray(num_bytes, dtype=float)
        seconds = np.full(np.broadcast_shapes(size.shape, stride.shape), np.nan)
        for ring in reversed(self.rings):
            here = size / ring.bytes_per_s + ring.latency_s
            seconds = np.where((stride < ring.reach) | np.isnan(seconds), here, seconds)
        return np.nan_to_num(seconds)


def distinct_units(units: Array, copies: float, groups: int = 1, top_groups: int = 1) -> Array:
    """Expected number of `units` that hold one of a row's `copies` = k experts, all equally likely: u·(1−(1−1/u)^k).
    Where experts are in groups, side by side, and a row reaches G of g groups, u is the units of G groups; units of
    several groups are hit by G groups rather than k experts."""
    within = np.where(units >= groups, units * top_groups / groups, units)
    drawn = np.where(units >= groups, copies, min(copies, top_groups))
    hit: Array = within * (1 - (1 - 1 / within) ** (drawn if groups > 1 else copies))
    return hit


def network(cluster: Cluster, measured: Peaks | None = None) -> Network:
    """The cluster's tiers as rings; a single chip has none. Collectives `measured` on this machine replace rate and
    latency of the innermost tier, unless that is a network."""
    rings, reach = [], 1
    for tier in cluster.tiers:
        reach *= tier.count
        speed, latency = link_speed(tier)
        share = 1.0 if tier.link.is_measured else SCALE_OUT if tier.link.kind == "scale_out" else SCALE_UP
        reduces = tier.link.in_network_reduction and not tier.link.is_measured
        rings.append(Ring(reach=reach, bytes_per_s=speed * share, latency_s=latency, reduces=reduces))
    on_machine = bool(rings) and cluster.tiers[0].link.kind != "scale_out"
    known = _measured_link(measured, cluster.fast_domain) if measured and on_machine else None
    if known:
        rings[0] = replace(rings[0], bytes_per_s=known[0], latency_s=known[1], reduces=False)
    return Network(rings=tuple(rings))


def _measured_link(measured: Peaks, inner: int) -> tuple[float, float] | None:
    """(rate, latency per step) of the link behind the fastest measured collective: a time of alpha + bytes / beta means
    a link of beta · the collective's wire factor, and its steps share alpha."""
    links = []
    for point in measured.points.get("collective", ()):
        world, op = int(point["world"]), str(point["op"])
        if 2 <= world <= inner and op in _RINGS:
            rate = float(point["bytes_per_s"]) * wire_factor(_RINGS[op], world)
            links.append((rate, float(point["alpha_s"]) / (world - 1)))
    return max(links, default=None)


_RINGS: dict[str, Collective] = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
}


def link_speed(tier: Tier | None) -> tuple[float, float]:
    """(bytes/s, latency) of a tier's link, or of an unknown one."""
    speed = tier.bytes_per_s if tier is not None else None
    latency = tier.link.latency_s if tier is not None else None
    return speed or UNKNOWN_BYTES_PER_S, UNKNOWN_LATENCY_S if latency is None else latency
