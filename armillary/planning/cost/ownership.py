"""Owned hardware: cost per hour of a bought device, and when buying beats renting.

per year       capex / years + power · PUE · (use + idle · (1 − use)) · 8,760 h · $/kWh + staff / devices
per used hour  per year / (8,760 · use)
month          the first at which capex + running costs so far are below the rent so far
utilisation    above which the used hours of a year cost less owned than rented
"""

from dataclasses import dataclass
from math import isfinite

from armillary.errors import BadInput
from armillary.spec.hardware import Cluster
from armillary.spec.tables.traffic import Cost

HOURS_A_YEAR, HOURS_A_MONTH = 8760.0, 730.0
IDLE = 0.3
"""power of an idle device over that of a busy one"""
NODE_SHARE = 1.25
"""price of a device with its share of host and network over that of the bare device, where only that is known"""
POWER_SHARE = 1.6
"""power of a device with its share of the host over its board power (DGX H100: 10.2 kW for 8 × 700 W is at most 1.8)"""


class NoPrice(BadInput):
    """A price or power that is neither published nor given."""


@dataclass(frozen=True, kw_only=True)
class Owned:
    """One bought device with its share of the node and of the staff, depreciated over `years`; `pue` is the power of
    the site over that of the machines under load."""

    capex_usd: float
    years: float
    power_w: float
    pue: float
    usd_per_kwh: float
    staff_usd_per_year: float
    capex_source: str = ""

    def running_usd_per_year(self, use: float) -> float:
        """Electricity, cooling and staff, with the device in use a share `use` of the time."""
        hours = (use + IDLE * (1 - use)) * HOURS_A_YEAR
        return self.power_w / 1e3 * self.pue * hours * self.usd_per_kwh + self.staff_usd_per_year

    def usd_per_year(self, use: float) -> float:
        return self.capex_usd / self.years + self.running_usd_per_year(use)

    def usd_per_hour(self, use: float) -> float:
        """Cost per hour in use."""
        if not 0 < use <= 1:
            raise BadInput(f"a utilisation of {use} is not a share; try --set cost.utilisation=0.8")
        return self.usd_per_year(use) / (HOURS_A_YEAR * use)

    def break_even_month(self, use: float, rent_usd_per_hour: float) -> float | None:
        """Months until owning has cost less than renting; None: not within the depreciation period."""
        saved = rent_usd_per_hour * use * HOURS_A_MONTH - self.running_usd_per_year(use) / 12
        months = self.capex_usd / saved if saved > 0 else float("inf")
        return months if months <= self.years * 12 else None

    def break_even_utilisation(self, rent_usd_per_hour: float) -> float | None:
        """Share of time in use above which an owned hour is cheaper than a rented one; None: never."""
        at_rest, more = self.usd_per_year(0.0), self.running_usd_per_year(1.0) - self.running_usd_per_year(0.0)
        saved = rent_usd_per_hour * HOURS_A_YEAR - more
        use = at_rest / saved if saved > 0 else float("inf")
        return use if use <= 1 else None


def owned(cost: Cost, cluster: Cluster, num_devices: int | None = None) -> Owned:
    """One device of the cluster, bought under the terms of the cost table."""
    devices = num_devices or cluster.num_devices
    capex, source = _capex(cost, cluster)
    return Owned(
        capex_usd=capex,
        years=cost.years,
        power_w=power_w(cluster),
        pue=cost.pue,
        usd_per_kwh=cost.usd_per_kwh,
        staff_usd_per_year=cost.staff_usd_per_year / devices,
        capex_source=source,
    )


def _capex(cost: Cost, cluster: Cluster) -> tuple[float, str]:
    if cost.usd_per_device is not None:
        return cost.usd_per_device, "cost.usd_per_device"
    node, chip = cluster.node, cluster.chip
    if node is not None and node.list_price_usd:
        return node.list_price_usd / node.num_chips, f"{node.title}, reported"
    if chip.list_price_usd:
        return chip.list_price_usd * NODE_SHARE, f"{chip.title}, reported, and a quarter for its share of the node"
    raise NoPrice(f"no purchase price of {chip.title} is known; try --set cost.usd_per_device=30000")


def power_w(cluster: Cluster) -> float:
    """Power of one device with its share of the node."""
    node, chip = cluster.node, cluster.chip
    if node is not None and node.power_w:
        return node.power_w / node.num_chips
    if chip.tdp_w and isfinite(chip.tdp_w):
        return chip.tdp_w * POWER_SHARE
    raise NoPrice(f"the power of {chip.title} is unknown; name another chip with --on")
