"""The cluster of a table row: its chip from the catalogue, in that chip's default node, with the stated network."""

from __future__ import annotations

import re
from dataclasses import replace

from armillary.errors import BadInput, NotFound
from armillary.planning.published.row_model import Row, number
from armillary.spec import catalogue
from armillary.spec.hardware import Chip, Cluster, Link, Node, Tier


def cluster_of(row: Row, num_devices: int) -> Cluster:
    """`num_devices` of the row's chip; where one chip counts as several devices (Trainium's cores), each is a part."""
    stated = int(number(row, "n_gpus") or num_devices)
    chip = chip_of(row.get("gpu") or "")
    parts = num_devices // stated if stated and num_devices % stated == 0 else 1
    part = _part(chip, parts)
    node = catalogue.nodes().get(chip.node)
    if node is None or num_devices == 1:
        return Cluster(name=row.get("gpu") or chip.name, chip=part, node=node)
    inner = _domain(num_devices, node.num_chips * node.domain * parts)
    network = _stated_network(row.get("interconnect") or "", node) or catalogue.link(node.network)
    near = Tier(link=_divided(catalogue.link(node.link), parts), count=inner, shape=node.shape)
    rest = num_devices // inner
    far = Tier(link=_divided(network, parts), count=rest, oversubscription=node.oversubscription)
    tiers = tuple(tier for tier in (near, far) if tier.count > 1)
    return Cluster(name=row.get("gpu") or chip.name, chip=part, node=node, tiers=tiers)


def _domain(num_devices: int, most: int) -> int:
    """Devices that share the inner links: the largest divisor that fits (64 of an NVL72 rack's 72)."""
    return next(size for size in range(min(most, num_devices), 0, -1) if num_devices % size == 0)


def _part(chip: Chip, parts: int) -> Chip:
    if parts == 1:
        return chip
    return replace(
        chip,
        memory_bytes=(chip.memory_bytes or 0) / parts,
        memory_bytes_per_s=(chip.memory_bytes_per_s or 0) / parts,
        flops={dtype: flops / parts for dtype, flops in chip.flops.items()},
        num_sms=max(1, (chip.num_sms or 1) // parts),
    )


def _divided(link: Link, parts: int) -> Link:
    return link if parts == 1 or link.bytes_per_s is None else replace(link, bytes_per_s=link.bytes_per_s / parts)


def chip_of(text: str) -> Chip:
    """'A100-80GB-SXM', 'TPU v4', 'A100 (unconfirmed)' as a chip of the catalogue; trailing words are dropped to fit."""
    words = re.sub(r"\(.*", "", text).strip().lower().replace("_", "-").replace("/", "-").split()
    parts = "-".join(words).split("-")
    for end in range(len(parts), 0, -1):
        try:
            return catalogue.chip("-".join(parts[:end]))
        except NotFound:
            continue
    raise BadInput(f"no chip '{text}' in the catalogue; armillary hardware lists them")


def _stated_network(text: str, node: Node) -> Link | None:
    """'1600 Gbps/node RoCE' or '8x200Gb HDR': the rate per chip; None where nothing is stated."""
    per_node = re.search(r"(\d+) ?Gbps/node", text)
    per_card = re.search(r"(\d+)\s*x\s*(\d+) ?Gb", text)
    if per_node:
        gigabits = float(per_node.group(1)) / node.num_chips
    elif per_card:
        gigabits = float(per_card.group(1)) * float(per_card.group(2)) / node.num_chips
    else:
        return None
    usual = catalogue.link(node.network)
    return replace(usual, name="stated", title=f"{gigabits:g} Gb/s per chip", bytes_per_s=gigabits * 1e9 / 8)
