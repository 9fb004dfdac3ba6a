"""Placement: which ranks an axis of a layout groups, and which tier of a cluster it crosses, as text.

Axes from the outermost to the innermost are pp, replicate, shard, tp. Context-parallel ranks (cp) are the innermost of
replicate, or of shard where weights are sharded, and expert ranks (ep) are the innermost of both together. Ranks are
numbered along the innermost tier first, as launchers do; an axis is as fast as the slowest link that any of its groups
crosses.
"""

from dataclasses import replace
from math import prod

from armillary.spec.hardware import Cluster, Tier
from armillary.spec.layout import Layout


def axis_sizes(layout: Layout) -> dict[str, int]:
    """Ranks along each axis; replicate × shard = dp × cp."""
    shard = layout.shard_size
    sizes = {"pp": layout.pp, "replicate": layout.dp // shard, "shard": shard, "tp": layout.tp}
    sizes["shard" if layout.zero else "replicate"] *= layout.cp
    return sizes


def expert_axis_sizes(layout: Layout) -> dict[str, int]:
    """The same ranks for experts: ep is innermost of dp × cp, so that the all-to-all is between neighbours; ranks with
    the same experts replicate or shard them like all other weights."""
    sizes = axis_sizes(layout)
    copies = sizes["replicate"] * sizes["shard"]
    shard = sizes["shard"] // layout.ep if sizes["shard"] % layout.ep == 0 else 1
    same = {"expert_replicate": copies // (layout.ep * shard), "expert_shard": shard}
    return {"pp": layout.pp} | same | {"ep": layout.ep, "tp": layout.tp}


def placement(layout: Layout, cluster: Cluster | None) -> list[str]:
    """'tp=8: neighbouring ranks, over NVLink 4 (8 devices)', one line per axis in use, innermost first."""
    sizes, inner = axis_sizes(layout), "shard" if layout.zero and layout.shard_size * layout.cp > 1 else "replicate"
    apart: dict[str, int] = {}
    for axis, size in sizes.items():
        apart |= {axis: size // layout.cp, "cp": layout.cp} if axis == inner else {axis: size}
    lines = axis_lines(apart, cluster)
    if layout.ep == 1 or (layout.dp * layout.cp) % layout.ep:
        return lines
    return lines + [line for line in axis_lines(expert_axis_sizes(layout), cluster) if line.startswith("ep=")]


def experts_apart(layout: Layout, cluster: Cluster) -> str:
    """A note where expert groups leave the fastest links although a smaller ep would stay on them; else ''."""
    if layout.ep == 1 or (layout.dp * layout.cp) % layout.ep:
        return ""
    tier, near = crossed("ep", expert_axis_sizes(layout), cluster)[0], cluster.tiers[0]
    fitting = [
        ep
        for ep in range(layout.ep - 1, 1, -1)
        if layout.ep % ep == 0 and crossed("ep", expert_axis_sizes(replace(layout, ep=ep)), cluster)[0] == near
    ]
    if tier is None or tier == near or not fitting:
        return ""
    return (
        f"experts over ep={layout.ep} ranks exchange tokens over {tier.link.title}; "
        f"ep={fitting[0]} stays inside {near.link.title}"
    )


def axis_lines(sizes: dict[str, int], cluster: Cluster | None) -> list[str]:
    """The same for any axes, outermost first."""
    return [_line(axis, sizes, cluster) for axis in reversed(sizes) if sizes[axis] > 1]


def _line(axis: str, sizes: dict[str, int], cluster: Cluster | None) -> str:
    neighbours = _inner(axis, sizes)
    near = "neighbouring ranks" if neighbours == 1 else f"every {ordinal(neighbours)} rank"
    if cluster is None:
        return f"{axis}={sizes[axis]}: {near}"
    tier, reach = crossed(axis, sizes, cluster)
    if tier is None:
        return f"{axis}={sizes[axis]}: {near}, more devices than {cluster.name} has"
    return f"{axis}={sizes[axis]}: {near}, over {tier.link.title} ({reach} devices)"


def crossed(axis: str, sizes: dict[str, int], cluster: Cluster) -> tuple[Tier | None, int]:
    """The innermost tier that contains every group of the axis, and the number of devices that tier spans."""
    stride, size = _inner(axis, sizes), sizes[axis]
    reach = 1
    for tier in cluster.tiers:
        reach *= tier.count
        if all(_first // reach == _last // reach for _first, _last in _ends(prod(sizes.values()), stride, size)):
            return tier, reach
    return None, reach


def _inner(axis: str, sizes: dict[str, int]) -> int:
    """Ranks between two neighbours on the axis."""
    names = list(sizes)
    return prod(sizes[name] for name in names[names.index(axis) + 1 :])


def _ends(total: int, stride: int, size: int) -> list[tuple[int, int]]:
    """(first, last) rank of every group of an axis."""
    span = stride * size
    return [(base + inner, base + inner + span - stride) for base in range(0, total, span) for inner in range(stride)]


def ordinal(number: int) -> str:
    """2nd, 8th, 32nd."""
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
