"""`armillary hardware`: the catalogue of chips, nodes, links and storage, or several things side by side.

Peaks are dense; what a vendor quotes with sparsity is shown apart, because no transformer step reaches it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any, Literal

import click

from armillary.cli import completion
from armillary.cli.output import Output
from armillary.cli.verb_decorator import verb
from armillary.machine.machine import here
from armillary.spec import catalogue
from armillary.spec.hardware import DTYPES, Chip, Cluster
from armillary.spec.toml.fields import to_plain
from armillary.store.home import Home
from armillary.units import bandwidth_text, bytes_text, dollars_text, flops_per_s_text, scaled, seconds_text


@verb
@click.argument("names", nargs=-1, metavar="[NAME]...", shell_complete=completion.hardware)
@click.option("--nodes", is_flag=True, help="List machines that can be bought or rented.")
@click.option("--links", is_flag=True, help="List links between devices.")
@click.option("--storage", is_flag=True, help="List storage tiers.")
def hardware(out: Output, home: Home, names: tuple[str, ...], nodes: bool, links: bool, storage: bool) -> None:
    """List chips, or show things side by side.

    NAME is a chip (h100), chips in their default nodes (h100x64), a node (dgx-h200), nodes (dgx-h200x8) or here.
    """
    if names:
        _show_some(out, [here() if name == "here" else catalogue.cluster(name) for name in names])
    elif nodes:
        _show_nodes(out)
    elif links:
        _show_links(out)
    elif storage:
        _show_storage(out)
    else:
        _show_chips(out)


def _show_some(out: Output, clusters: list[Cluster]) -> None:
    figures = [[name, *(figure(cluster) for cluster in clusters)] for name, figure in _figures(clusters)]
    known = [row for row in figures if any(value not in (None, "", (), 0) for value in row[1:])]
    out.table("", ["", *(cluster.name for cluster in clusters)], known)
    chips = {cluster.chip.name: cluster.chip for cluster in clusters}
    for chip in chips.values():
        if sources_of(chip):
            out.say()
            out.fields(f"sources, {chip.title}", sources_of(chip))
    out.result([_facts(cluster) for cluster in clusters], quiet=[cluster.text() for cluster in clusters])


def _facts(cluster: Cluster) -> dict[str, Any]:
    prices = [to_plain(price) for price in catalogue.prices(cluster.chip.name)]
    return {**to_plain(cluster), "num_devices": cluster.num_devices, "prices": prices}


# --- lists


def _show_chips(out: Output) -> None:
    chips = catalogue.chips()
    columns = ["name", "memory", "bandwidth", "fp16 FLOP/s", "bf16 FLOP/s", "fp8 FLOP/s", "power", "rent/h", "year"]
    out.table("", columns, [_chip_row(chip) for chip in chips.values()])
    out.say(f"\n{len(chips)} chips, dense peaks; NAME… shows some side by side; also --nodes, --links, --storage")
    out.result(list(chips.values()), quiet=chips)


def _chip_row(chip: Chip) -> list[object]:
    rents = [price.usd_per_hour for price in catalogue.prices(chip.name)]
    return [
        chip.name,
        _known(bytes_text, chip.memory_bytes),
        _known(bandwidth_text, chip.memory_bytes_per_s),
        *(_peak(chip, dtype) for dtype in ("fp16", "bf16", "fp8")),
        f"{chip.tdp_w:,.0f} W" if chip.tdp_w else None,
        dollars_text(median(rents)) if rents else None,
        str(chip.year or ""),
    ]


def _show_nodes(out: Output) -> None:
    nodes = catalogue.nodes()
    rows = [
        [x.name, f"{x.num_chips} × {x.chip}", x.link, x.network, _known(bytes_text, x.memory_bytes)]
        for x in nodes.values()
    ]
    out.table("", ["name", "chips", "between chips", "to other nodes", "memory"], rows)
    out.result(list(nodes.values()), quiet=nodes)


def _show_links(out: Output) -> None:
    links = catalogue.links()
    rows = [[x.name, x.title, x.kind, link_speed(x.bytes_per_s, x.latency_s)] for x in links.values()]
    out.table("", ["name", "title", "kind", "bandwidth, latency"], rows)
    out.say("\none direction, one device's share")
    out.result(list(links.values()), quiet=links)


def _show_storage(out: Output) -> None:
    tiers = catalogue.storages()
    rows: list[list[object]] = [
        [
            tier.name,
            tier.title,
            bandwidth_text(tier.read_bytes_per_s),
            bandwidth_text(tier.write_bytes_per_s),
            seconds_text(tier.latency_s),
            _known("${:.3f}".format, tier.usd_per_gb_month),
        ]
        for tier in tiers.values()
    ]
    out.table("", ["name", "title", "read", "write", "latency", "$/GB/month"], rows)
    out.result(list(tiers.values()), quiet=tiers)


def _peak(chip: Chip, dtype: str) -> str | None:
    peak = chip.peak(dtype)
    return flops_per_s_text(peak).removesuffix("FLOP/s") if peak is not None else None


Figure = tuple[str, Callable[[Cluster], object]]


def sources_of(chip: Chip) -> list[tuple[str, str]]:
    """(figure, where it is published) of a chip, and its note."""
    rows = [("figures" if key == "all" else key.replace("_", " "), source) for key, source in chip.sources.items()]
    return [*rows, ("note", chip.note)] if chip.note else rows


def _figures(clusters: Sequence[Cluster]) -> list[Figure]:
    return [
        ("chip", lambda c: c.chip.title),
        ("maker", lambda c: c.chip.vendor),
        ("year", lambda c: str(c.chip.year or "")),
        ("devices", lambda c: c.num_devices if c.num_devices > 1 else None),
        *_tier_figures(clusters),
        ("memory", lambda c: _memory(c.chip)),
        ("bandwidth", lambda c: _known(bandwidth_text, c.chip.memory_bytes_per_s)),
        *[(dtype, partial(_rate, "flops", dtype)) for dtype in DTYPES],
        *[(f"{dtype} sparse", partial(_rate, "sparse_flops", dtype)) for dtype in DTYPES],
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
    return [(names[min(level, 2)], partial(_tier_text, level)) for level in range(depth)]


def _tier_text(level: int, cluster: Cluster) -> str | None:
    if level >= len(cluster.tiers):
        return None
    tier = cluster.tiers[level]
    shape = f" {tier.shape}" if tier.shape != "switch" else ""
    over = f", {tier.oversubscription:g}:1" if tier.oversubscription != 1 else ""
    return f"{tier.count} by {tier.link.title}{shape} ({link_speed(tier.bytes_per_s, tier.link.latency_s)}{over})"


def link_speed(bytes_per_s: float | None, latency_s: float | None) -> str:
    if bytes_per_s is None or latency_s is None:
        return "not measured"
    return f"{bandwidth_text(bytes_per_s)}, {seconds_text(latency_s)}"


def _memory(chip: Chip) -> str | None:
    return f"{bytes_text(chip.memory_bytes)} {chip.memory_type}".rstrip() if chip.memory_bytes is not None else None


def _rate(peaks: Literal["flops", "sparse_flops"], dtype: str, cluster: Cluster) -> str | None:
    """Integers are operations, not floating-point ones."""
    peak = getattr(cluster.chip, peaks).get(dtype)
    return None if peak is None else scaled(peak, "OP/s" if dtype.startswith("int") else "FLOP/s")


def _times(text: Callable[[float], str], cluster: Cluster, each: float | None) -> str | None:
    return text(each * cluster.num_devices) if each is not None and cluster.num_devices > 1 else None


def _rent(cluster: Cluster, *, spot: bool) -> str | None:
    """Median and range of the price per hour of one chip, and of all."""
    offers = catalogue.prices(cluster.chip.name)
    hourly = [price.spot_usd_per_hour if spot else price.usd_per_hour for price in offers]
    known = sorted(value for value in hourly if value is not None)
    if not known:
        return None
    span = f" ({dollars_text(known[0])} to {dollars_text(known[-1])})" if len(known) > 1 else ""
    total = f" × {cluster.num_devices:,} = {dollars_text(median(known) * cluster.num_devices)}"
    return dollars_text(median(known)) + span + (total if cluster.num_devices > 1 else "")


def _known(text: Callable[[float], str], value: float | None) -> str | None:
    return text(value) if value is not None else None
