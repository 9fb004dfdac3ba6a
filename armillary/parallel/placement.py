"""Which tier of a cluster an axis of the mesh crosses, in words.

Ranks are numbered along the innermost tier first, as launchers do; an axis is as fast as the slowest link that any
of its groups crosses.
"""

from __future__ import annotations

from math import prod

from armillary.spec.hardware import Cluster, Tier


def axis_words(sizes: dict[str, int], cluster: Cluster | None) -> list[str]:
    """'tp=8 stays inside NVLink 4 (8 devices)', one line for each axis in use, innermost first."""
    return [_words(axis, sizes, cluster) for axis in reversed(sizes) if sizes[axis] > 1]


def _words(axis: str, sizes: dict[str, int], cluster: Cluster | None) -> str:
    neighbours = _inner(axis, sizes)
    near = "neighbouring ranks" if neighbours == 1 else f"every {ordinal(neighbours)} rank"
    if cluster is None:
        return f"{axis}={sizes[axis]}: {near}"
    tier, reach = crossed(axis, sizes, cluster)
    if tier is None:
        return f"{axis}={sizes[axis]}: {near}, more devices than {cluster.name} has"
    return f"{axis}={sizes[axis]}: {near}, over {tier.link.title} ({reach} devices)"


def crossed(axis: str, sizes: dict[str, int], cluster: Cluster) -> tuple[Tier | None, int]:
    """The innermost tier that holds every group of the axis whole, and how many devices that tier spans."""
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
