"""The recipe's [hardware] table: a hardware string, or a chip and the nested tiers that connect its copies."""

from dataclasses import dataclass, replace
from typing import Literal

from armillary.errors import BadRecipe
from armillary.spec import catalogue
from armillary.spec.hardware import Cluster, Link, Tier

UNKNOWN_NETWORK = Link(name="network", title="a network", bytes_per_s=None, latency_s=None, kind="scale_out")


@dataclass(frozen=True, kw_only=True)
class TierTable:
    """One tier of a cluster, innermost first."""

    link: str
    """link between them (a name in the catalogue)"""
    count: int
    """number of units inside"""
    oversubscription: float = 1.0
    """bandwidth into the tier over bandwidth through it (2: half)"""
    shape: Literal["switch", "torus", "mesh"] = "switch"
    """topology"""


@dataclass(frozen=True, kw_only=True)
class HardwareTable:
    """Where it runs."""

    on: str = "here"
    """CHIPxN or NODExN, like h100x64 or dgx-h200x8; here: this machine"""
    chip: str = ""
    """instead of on: a chip of the catalogue"""
    tiers: tuple[TierTable, ...] = ()
    """with chip: links between its copies, innermost first; none: a single chip"""
    nodes: int = 1
    """with here: machines like this one, which armillary launch starts; other strings state their number themselves"""
    network: str = ""
    """with nodes: link between them (a name in the catalogue); empty: unknown until armillary launch --check"""

    power_limit_w: float | None = None
    """watts that each chip is limited to, where that is below its usual power"""

    def __post_init__(self) -> None:
        if self.power_limit_w is not None and self.power_limit_w <= 0:
            raise BadRecipe(f"hardware.power_limit_w={self.power_limit_w:g} must be above 0; leave it out for no limit")
        if self.on != "here" and (self.chip or self.tiers):
            raise BadRecipe("[hardware] takes on, or chip with tiers, not both; leave one out")
        if self.tiers and not self.chip:
            raise BadRecipe("[hardware] tiers need a chip; try --set hardware.chip=h100-sxm")
        if self.nodes < 1:
            raise BadRecipe(f"hardware.nodes={self.nodes} is no machine; try --set hardware.nodes=1")
        if self.nodes > 1 and not self.is_here:
            raise BadRecipe("hardware.nodes counts machines like this one; state others like hardware.on=dgx-h200x8")

    @property
    def is_here(self) -> bool:
        """Whether the caller must detect this machine."""
        return not self.chip and self.on == "here"

    def cluster(self, here: Cluster | None = None) -> Cluster:
        """The devices; `here` stands for this machine."""
        cluster = self._cluster(here)
        if self.power_limit_w is None:
            return cluster
        return replace(cluster, chip=replace(cluster.chip, power_limit_w=self.power_limit_w))

    def _cluster(self, here: Cluster | None) -> Cluster:
        if self.is_here:
            assert here is not None, "the caller resolves `here`"
            return self._copies(here)
        if not self.chip:
            return catalogue.cluster(self.on)
        return self._by_tiers()

    def _copies(self, here: Cluster) -> Cluster:
        """So many machines like this one, connected by the network."""
        if self.nodes == 1:
            return here
        link = catalogue.link(self.network) if self.network else UNKNOWN_NETWORK
        return replace(here, tiers=(*here.tiers, Tier(link=link, count=self.nodes)))

    def _by_tiers(self) -> Cluster:
        tiers = tuple(
            Tier(link=catalogue.link(t.link), count=t.count, oversubscription=t.oversubscription, shape=t.shape)
            for t in self.tiers
        )
        chip = catalogue.chip(self.chip)
        return Cluster(name=f"{chip.name} by tiers", chip=chip, tiers=tiers)
