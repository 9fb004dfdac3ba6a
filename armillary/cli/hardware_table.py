"""Pieces of hardware side by side: one column each, one row a figure, rows nobody knows left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from armillary.spec import catalogue
from armillary.spec.hardware import DTYPES, Chip, Cluster, Tier
from armillary.units import bandwidth_text, bytes_text, dollars_text, flops_per_s_text, scaled, seconds_text

Figure = tuple[str, Callable[[Cluster], object]]


def columns_of(clusters: Sequence[Cluster]) -> list[list[object]]:
    """Rows of [figure, value in each cluster]."""
    rows = [[name, *(figure(cluster) for cluster in clusters)] for name, figure in _figures(clusters)]
    return [row for row in rows if any(value not in (None, "", (), 0) for value in row[1:])]


def sources_of(chip: Chip) -> list[tuple[str, str]]:
    """(figure, where it is published) of a chip, and its note."""
    pairs = [("figures" if key == "all" else key.replace("_", " "), source) for key, source in chip.sources.items()]
    return [*pairs, ("note", chip.note)] if chip.note else pairs


def _figures(clusters: Sequence[Cluster]) -> list[Figure]:
    return [
        ("chip", lambda c: c.chip.title),
        ("maker", lambda c: c.chip.vendor),
        ("year", lambda c: str(c.chip.year or "")),
        ("devices", lambda c: c.num_devices if c.num_devices > 1 else None),
        *_tier_figures(clusters),
        ("memory", lambda c: _memory(c.chip)),
        ("bandwidth", lambda c: _known(bandwidth_text, c.chip.memory_bytes_per_s)),
        *[(dtype, _peak(dtype)) for dtype in DTYPES],
        *[(f"{dtype} sparse", _sparse(dtype)) for dtype in DTYPES],
        ("bf16, all devices", lambda c: _times(flops_per_s_text, c, c.chip.peak("bf16"))),
        ("memory, all devices", lambda c: _times(bytes_text, c, c.chip.memory_bytes)),
        ("last-level cache", lambda c: _known(bytes_text, c.chip.l2_bytes)),
        ("cores or SMs", lambda c: c.chip.num_sms),
        ("power", lambda c: f"{c.chip.tdp_w:,.0f} W" if c.chip.tdp_w else None),
        ("host link", lambda c: c.chip.host_link),
        ("node", lambda c: c.node.title if c.node else None),
        ("node power", lambda c: f"{c.node.power_w:,.0f} W" if c.node and c.node.power_w else None),
        ("node cores", lambda c: c.node.cpu_cores if c.node else None),
        ("node memory", lambda c: _known(bytes_text, c.node.memory_bytes) if c.node else None),
        ("node storage", lambda c: _known(bytes_text, c.node.storage_bytes) if c.node else None),
        ("list price", lambda c: _known(dollars_text, c.chip.list_price_usd)),
        ("node list price", lambda c: _known(dollars_text, c.node.list_price_usd) if c.node else None),
        ("rent an hour", lambda c: _rent(c, spot=False)),
        ("spot an hour", lambda c: _rent(c, spot=True)),
        ("precisions", lambda c: c.chip.precisions),
        ("software", lambda c: c.chip.frameworks),
    ]


def _tier_figures(clusters: Sequence[Cluster]) -> list[Figure]:
    depth = max(len(cluster.tiers) for cluster in clusters)
    names = ("inside", "between", "beyond")
    return [(names[min(level, 2)], _tier(level)) for level in range(depth)]


def _tier(level: int) -> Callable[[Cluster], object]:
    return lambda cluster: _tier_text(cluster.tiers[level]) if level < len(cluster.tiers) else None


def _tier_text(tier: Tier) -> str:
    shape = f" {tier.shape}" if tier.shape != "switch" else ""
    over = f", {tier.oversubscription:g}:1" if tier.oversubscription != 1 else ""
    return f"{tier.count} by {tier.link.title}{shape} ({link_speed(tier.bytes_per_s, tier.link.latency_s)}{over})"


def link_speed(bytes_per_s: float | None, latency_s: float | None) -> str:
    if bytes_per_s is None or latency_s is None:
        return "not measured"
    return f"{bandwidth_text(bytes_per_s)}, {seconds_text(latency_s)}"


def _memory(chip: Chip) -> str | None:
    return f"{bytes_text(chip.memory_bytes)} {chip.memory_type}".rstrip() if chip.memory_bytes is not None else None


def _peak(dtype: str) -> Callable[[Cluster], object]:
    return lambda cluster: _rate(dtype, cluster.chip.flops.get(dtype))


def _sparse(dtype: str) -> Callable[[Cluster], object]:
    return lambda cluster: _rate(dtype, cluster.chip.sparse_flops.get(dtype))


def _rate(dtype: str, peak: float | None) -> str | None:
    """Integers are operations, not floating-point ones."""
    return None if peak is None else scaled(peak, "OP/s" if dtype.startswith("int") else "FLOP/s")


def _times(text: Callable[[float], str], cluster: Cluster, each: float | None) -> str | None:
    return text(each * cluster.num_devices) if each is not None and cluster.num_devices > 1 else None


def _rent(cluster: Cluster, *, spot: bool) -> str | None:
    """Median and range of what one chip, and the whole, costs an hour."""
    offers = [price for price in catalogue.prices() if price.chip == cluster.chip.name]
    hourly = [price.spot_usd_per_hour if spot else price.usd_per_hour for price in offers]
    known = sorted(value for value in hourly if value is not None)
    if not known:
        return None
    span = f" ({dollars_text(known[0])} to {dollars_text(known[-1])})" if len(known) > 1 else ""
    whole = f" × {cluster.num_devices:,} = {dollars_text(median(known) * cluster.num_devices)}"
    return dollars_text(median(known)) + span + (whole if cluster.num_devices > 1 else "")


def _known(text: Callable[[float], str], value: float | None) -> str | None:
    return text(value) if value is not None else None
