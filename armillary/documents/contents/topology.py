"""The cluster as a diagram: storage, network, nodes with their devices and links."""

from armillary.documents.values import clean
from armillary.report.diagram import Box, Diagram, Line
from armillary.spec.hardware import Cluster, Tier
from armillary.units import bandwidth_text

WIDTH, NODE_WIDTH, GAP = 960.0, 212.0, 24.0
SHOWN_NODES, SHOWN_CHIPS = 4, 8
CHIP_ROW = 34.0


def topology(cluster: Cluster, axes: str = "") -> Diagram:
    """At most four nodes of eight devices are drawn; the texts say how many there are."""
    inner = cluster.tiers[0] if cluster.tiers else None
    chips = inner.count if inner else 1
    nodes = cluster.num_devices // chips
    shown = min(nodes, SHOWN_NODES)
    boxes, lines = list[Box](), list[Line]()
    top = 14.0
    if nodes > 1:
        boxes.append(Box(x=0, y=top, width=WIDTH, height=40, text=_network(cluster.tiers[1:]), fill="two"))
        top += 40 + 44
    height = 60 + CHIP_ROW * ((min(chips, SHOWN_CHIPS) + 1) // 2) + 40
    left = (WIDTH - shown * NODE_WIDTH - (shown - 1) * GAP) / 2
    for i in range(shown):
        x = left + i * (NODE_WIDTH + GAP)
        if nodes > 1:
            lines.append(Line(x1=x + NODE_WIDTH / 2, y1=54, x2=x + NODE_WIDTH / 2, y2=top))
        boxes += _node(cluster, inner, x, top, height, _node_name(i, shown, nodes))
    bottom = top + height + 14
    if axes:
        boxes.append(Box(x=0, y=bottom, width=WIDTH, height=34, text=clean(axes), fill=""))
        bottom += 34 + 8
    return Diagram(label=f"Topology: {cluster.text()}", width=WIDTH, height=bottom, boxes=boxes, lines=lines)


def _network(tiers: tuple[Tier, ...]) -> str:
    return ", ".join(
        f"{tier.link.title}: {tier.count} ×, {_speed(tier)} per device"
        + (f", {tier.oversubscription:g}:1 oversubscribed" if tier.oversubscription > 1 else "")
        for tier in tiers
    )


def _speed(tier: Tier) -> str:
    return bandwidth_text(tier.bytes_per_s) if tier.bytes_per_s else "unknown speed"


def _node_name(i: int, shown: int, nodes: int) -> str:
    if i == shown - 1 and nodes > shown:
        return f"node {nodes:,} of {nodes:,}"
    return f"node {i + 1}" + (" …" if nodes > shown and i == shown - 2 else "")


def _node(cluster: Cluster, inner: Tier | None, x: float, y: float, height: float, name: str) -> list[Box]:
    chips = inner.count if inner else 1
    shown = min(chips, SHOWN_CHIPS)
    boxes = [Box(x=x, y=y, width=NODE_WIDTH, height=height, text=name, fill="", is_group=True)]
    width = (NODE_WIDTH - 36) / 2
    for i in range(shown):
        text = f"… {chips} ×" if i == shown - 1 and chips > shown else cluster.chip.title
        at_x, at_y = x + 12 + (i % 2) * (width + 12), y + 28 + (i // 2) * CHIP_ROW
        boxes.append(Box(x=at_x, y=at_y, width=width, height=CHIP_ROW - 8, text=text, fill="one"))
    link = f"{inner.link.title}, {_speed(inner)}" if inner and chips > 1 else "one device"
    boxes.append(Box(x=x + 12, y=y + height - 40, width=NODE_WIDTH - 24, height=28, text=link, fill="three"))
    return boxes
