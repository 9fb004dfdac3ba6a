"""Sections on what is bought or rented and how it is connected: bill of materials, topology, network, storage."""

from __future__ import annotations

from math import ceil

from armillary.documents.blocks import Cell, Paragraph, Picture, Section, Table
from armillary.documents.contents.topology import topology
from armillary.documents.facts import PlanFacts
from armillary.documents.figures import Figures
from armillary.documents.values import plural
from armillary.planning.cost.storage import fits
from armillary.spec.hardware import Cluster
from armillary.spec.layout_rules.placement import placement
from armillary.units import bytes_text

SWITCH_PORTS = 64
"""ports of a switch, half of a leaf's to the devices: a fat tree of two levels without oversubscription"""


def bill_of_materials(facts: PlanFacts, figures: Figures) -> Section:
    cluster = facts.cluster
    devices = "devices" if "devices" in figures else "serving_devices"
    prefix = "" if "devices" in figures else "serving_"
    rows: list[list[Cell]] = []
    priced = f"{prefix}capex" in figures
    title = f"{cluster.chip.title} with its share of the node"
    if priced:
        total = figures.calculated(f"{devices} * {prefix}capex", "money")
        source = figures[f"{prefix}capex"].source
        rows.append([title, figures.amount(devices), figures.amount(f"{prefix}capex"), total, source])
    else:
        rows.append([title, figures.amount(devices), "–", "–", "no purchase price is known: cost.usd_per_device"])
    rows += _parts(facts, figures, devices)
    if facts.training and facts.serving and "capex" in figures:
        extra = figures.calculated("serving_devices * serving_capex", "money")
        unit = figures.amount("serving_capex")
        rows.append([f"{title}, serving", figures.amount("serving_devices"), unit, extra, "if bought beside training"])
    text = (
        figures.say(
            "The plan needs {count}. Bought, they cost {total} at {each} per device, hosts and network cards "
            "included; rows marked “in the row above” are part of that price, and rows without a price are not in it.",
            count=plural(figures[devices].value, "device"),
            total=figures.notation.text(figures.evaluate(f"{devices} * {prefix}capex"), "money", short=True),
            each=figures.text(f"{prefix}capex"),
        )
        if priced
        else figures.say(
            "The plan needs {count}; no purchase price is known.", count=plural(figures[devices].value, "device")
        )
    )
    columns = ("item", "quantity", "unit price", "total", "source")
    table = Table(caption="Bill of materials", columns=columns, rows=rows)
    return Section(key="bill", title="Bill of materials", blocks=[Paragraph(text=text), table], points=[text])


def _parts(facts: PlanFacts, figures: Figures, devices: str) -> list[list[Cell]]:
    cluster, node = facts.cluster, facts.cluster.node
    if node is None:
        return []
    above = "in the row above"
    chips = node.num_chips
    rows: list[list[Cell]] = [
        [node.title, figures.calculated(f"ceil({devices} / {chips})", "count"), above, above, node.source]
    ]
    if node.storage and node.num_drives:
        drives = figures.calculated(f"ceil({devices} / {chips}) * {node.num_drives}", "count")
        rows.append([f"{node.storage} drives", drives, above, above, node.source])
    if len(cluster.tiers) > 1:
        rows += _fabric(cluster, figures, devices)
    return rows


def _fabric(cluster: Cluster, figures: Figures, devices: str) -> list[list[Cell]]:
    outer = cluster.tiers[-1]
    share = f"{outer.oversubscription:g}"
    ports = f"ceil({devices} / {share})"
    leaves = f"ceil({ports} / {SWITCH_PORTS // 2})"
    rows: list[list[Cell]] = [
        [
            f"{outer.link.title} ports",
            figures.calculated(ports, "count"),
            "in the row above",
            "in the row above",
            "node",
        ],
        ["leaf switches", figures.calculated(leaves, "count"), "–", "–", f"{SWITCH_PORTS} ports, half of them down"],
    ]
    if ceil(cluster.num_devices / outer.oversubscription / (SWITCH_PORTS // 2)) > 1:
        spines = figures.calculated(f"ceil({leaves} / 2)", "count")
        rows.append(["spine switches", spines, "–", "–", f"{SWITCH_PORTS} ports"])
    return rows


def topology_section(facts: PlanFacts, figures: Figures) -> Section:
    cluster, plan = facts.cluster, facts.training
    axes = plan.prediction.layout().text("tp", "pp", "cp", "ep", "dp") if plan else ""
    picture = Picture(
        caption=f"Topology of {cluster.text()}", diagram=topology(cluster, f"training layout: {axes}" if axes else "")
    )
    text = f"{cluster.text()}. " + (
        f"Devices of one node share {cluster.tiers[0].link.title}; nodes are joined by {cluster.tiers[-1].link.title}."
        if len(cluster.tiers) > 1
        else "All devices are in one node."
        if cluster.num_devices > 1
        else "There is one device."
    )
    return Section(key="topology", title="Topology", blocks=[Paragraph(text=text), picture], points=[text])


def network_section(facts: PlanFacts, figures: Figures) -> Section:
    """Which link each axis crosses, and how much of a step waits for it."""
    cluster, plan = facts.cluster, facts.training
    rows: list[list[Cell]] = [
        [
            tier.link.title,
            f"{tier.count:,}",
            bytes_text(tier.bytes_per_s) + "/s" if tier.bytes_per_s else "unknown",
            f"{tier.oversubscription:g}:1",
            tier.link.source or "–",
        ]
        for tier in cluster.tiers
        if tier.count > 1
    ]
    blocks: list[Paragraph | Table] = []
    if plan is not None:
        time = plan.prediction.time
        share = float(time.exposed[0] / time.total[0])
        text = figures.say(
            "Of a step of {step_s}, {exposed} ({share}) waits for communication; the rest of {comm} is hidden behind "
            "computation.",
            exposed=figures.text("step_comm_exposed_s"),
            share=f"{share:.1%}".replace("%", " %"),
            comm=figures.notation.text(float(time.comm[0]), "s"),
        )
        where = placement(plan.prediction.layout(), cluster) if len(cluster.tiers) > 1 else []
        blocks = [Paragraph(text=text), *(Paragraph(text=line) for line in where)]
        costs: list[list[Cell]] = [
            [name, figures.notation.text(float(cost.total[0]), "s"), figures.notation.text(float(cost.exposed[0]), "s")]
            for name, cost in time.comm_costs.items()
            if float(cost.total[0]) > 0
        ]
        if costs:
            blocks.append(Table(caption="Communication per step", columns=("of", "total", "exposed"), rows=costs))
    if rows:
        columns = ("link", "count", "per device", "oversubscription", "source")
        blocks.append(Table(caption="Links", columns=columns, rows=rows))
    if not blocks:
        blocks = [Paragraph(text="One device: nothing crosses a network but requests and data.")]
    return Section(key="network", title="Network", blocks=blocks)


def storage_section(facts: PlanFacts, figures: Figures) -> Section | None:
    plan = facts.training
    if plan is None:
        return None
    rows: list[list[Cell]] = []
    for need in plan.storage().needs:
        first = fits(need, facts.cluster)[0]
        tier = first.tier.title if first.holds else f"none: {first.tier.title} is {first.short:.1f} × short"
        keys = (f"{need.name}_bytes", f"{need.name}_kept_bytes", f"{need.name}_read", f"{need.name}_write")
        rows.append([need.name, *(figures.amount(key) for key in keys), tier])
    text = figures.say(
        "The data set of {total_tokens} tokens takes {dataset_bytes}, a checkpoint with optimizer states "
        "{checkpoint_bytes}; together {stored_bytes} are stored."
    )
    if "storage_month" in figures:
        text += figures.say(" In an object store that costs {storage_month} a month.")
    columns = ("what", "size", "all copies", "read", "write", "slowest tier that does")
    table = Table(caption="Storage needs", columns=columns, rows=rows)
    return Section(key="storage", title="Storage", blocks=[Paragraph(text=text), table])
