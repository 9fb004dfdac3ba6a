"""`armillary hardware`: the catalogue of chips, nodes, links and storage, or several things side by side.

Peaks are dense; what a vendor quotes with sparsity is shown apart, because no transformer step reaches it.
"""

from __future__ import annotations

from statistics import median
from typing import Any

import click

from armillary.cli import completion
from armillary.cli.hardware_table import columns_of, link_speed, sources_of
from armillary.cli.output import Output
from armillary.cli.verb import verb
from armillary.machine.machine import here
from armillary.spec import catalogue
from armillary.spec.hardware import Chip, Cluster
from armillary.spec.toml.fields import to_plain
from armillary.store.home import Home
from armillary.units import bandwidth_text, bytes_text, dollars_text, flops_per_s_text, seconds_text


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
        _show_some(out, [find(name) for name in names])
    elif nodes:
        _show_nodes(out)
    elif links:
        _show_links(out)
    elif storage:
        _show_storage(out)
    else:
        _show_chips(out)


def find(text: str) -> Cluster:
    """A hardware string as a cluster; `here` is this machine."""
    return here() if text == "here" else catalogue.cluster(text)


def _show_some(out: Output, clusters: list[Cluster]) -> None:
    """Columns side by side, then where each figure comes from."""
    out.table("", ["", *(cluster.name for cluster in clusters)], columns_of(clusters))
    chips = {cluster.chip.name: cluster.chip for cluster in clusters}
    for chip in chips.values():
        if sources_of(chip):
            out.say()
            out.fields(f"sources, {chip.title}", sources_of(chip))
    out.result([_facts(cluster) for cluster in clusters], quiet=[cluster.text() for cluster in clusters])


def _facts(cluster: Cluster) -> dict[str, Any]:
    prices = [to_plain(price) for price in catalogue.prices() if price.chip == cluster.chip.name]
    return {**to_plain(cluster), "num_devices": cluster.num_devices, "prices": prices}


# --- lists


def _show_chips(out: Output) -> None:
    chips = catalogue.chips()
    columns = ["name", "memory", "bandwidth", "fp16 FLOP/s", "bf16 FLOP/s", "fp8 FLOP/s", "power", "rent/h", "year"]
    out.table("", columns, [_chip_row(chip) for chip in chips.values()])
    out.say(f"\n{len(chips)} chips, dense peaks; NAME… shows some side by side; also --nodes, --links, --storage")
    out.result(list(chips.values()), quiet=chips)


def _chip_row(chip: Chip) -> list[object]:
    rents = [price.usd_per_hour for price in catalogue.prices() if price.chip == chip.name]
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
    columns = ["name", "chips", "between chips", "to other nodes", "memory"]
    rows: list[list[object]] = [
        [
            node.name,
            f"{node.num_chips} × {node.chip}",
            node.link,
            node.network,
            _known(bytes_text, node.memory_bytes),
        ]
        for node in nodes.values()
    ]
    out.table("", columns, rows)
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


def _known(text: Any, value: float | None) -> str | None:
    return text(value) if value is not None else None


def _peak(chip: Chip, dtype: str) -> str | None:
    peak = chip.peak(dtype)
    return flops_per_s_text(peak).removesuffix("FLOP/s") if peak is not None else None
