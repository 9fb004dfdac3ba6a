"""Levels of a memory from a curve of latencies over working sets: its plateaus, and where each ends.

Between two plateaus the latency is a mixture of both levels. So every point is either on a plateau, whose cost is its
distance from it, or on a slope between two, at a fixed cost; and a plateau costs as much as a few points on a slope.
The division of the curve with the lowest cost is found exactly. Nothing is asked of the system: a cache is as large as
the working set up to which its latency holds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, inf, log
from statistics import median

import numpy as np

Curve = Sequence[tuple[float, float]]
"""(bytes, seconds) by growing bytes"""
LEAST_RATIO, FLAT_RATIO = 1.25, 1.1
"""of two plateaus' latencies, below which they are one; the second where both are flat, as the far half of a GPU's L2
and its memory are"""
FLAT = 1 / 8
"""points of flat plateaus are this share of the step between them off their level, on average"""
LEAST_SPAN = 1.6
"""ratio of the last working set of a plateau to its first"""
SLOPE_POINT, OUTLIER = 0.16, 0.5
"""cost of a point on a slope, and the highest of one on a plateau, in log(seconds): a point that is 17 % off a plateau
rather belongs to a slope, and one point that was disturbed does not end a plateau"""
PLATEAU = 0.64
"""cost of a plateau: four points on a slope"""
ABOVE = 0.15
"""share of the way to the next plateau, in seconds, at which a level counts as exceeded"""


LAST = 3
"""points that stand for the end of a curve that still rises"""


@dataclass(frozen=True, kw_only=True)
class Plateau:
    """A level of the hierarchy: `bytes` is the largest working set that it holds, None for the last."""

    seconds: float
    bytes: float | None
    first: float  # working sets between which it was seen
    last: float


def plateaus(curve: Curve, *, rising: bool = False) -> list[Plateau]:
    """From the fastest level to the slowest. `rising`: where the curve goes on rising after its last plateau, its last
    points are a level too, such as page tables that fall out of one cache after the other."""
    spans = _merged(curve, _divided(curve))
    spans += [(len(curve) - LAST, len(curve))] if rising and _rises(curve, *spans[-1]) else []
    levels = [exp(_level(curve, *span)) for span in spans]
    results = []
    for at, ((begin, end), level) in enumerate(zip(spans, levels, strict=True)):
        size = _exceeded(curve, begin, end, level, levels[at + 1]) if at + 1 < len(spans) else None
        results.append(Plateau(seconds=level, bytes=size, first=curve[begin][0], last=curve[end - 1][0]))
    return results


def _rises(curve: Curve, begin: int, end: int) -> bool:
    """Whether all points after the last plateau are above it, and enough of them."""
    limit = _level(curve, begin, end) + log(LEAST_RATIO)
    return len(curve) - end > LAST and all(log(seconds) > limit for _, seconds in curve[end + 1 :])


def _divided(curve: Curve) -> list[tuple[int, int]]:
    """The ranges of points that are plateaus, by dynamic programming over where each begins and ends."""
    count, values = len(curve), np.log([seconds for _, seconds in curve])
    cost, chosen = [0.0] + [inf] * count, [0] * (count + 1)  # of the first n points; where their last plateau begins
    for end in range(1, count + 1):
        cost[end], chosen[end] = cost[end - 1] + SLOPE_POINT, end
        for begin in range(end - 1):
            if curve[end - 1][0] < LEAST_SPAN * curve[begin][0]:
                break
            if cost[begin] + PLATEAU >= cost[end]:
                continue
            total = cost[begin] + PLATEAU + _distance(values[begin:end])
            if total < cost[end]:
                cost[end], chosen[end] = total, begin
    spans, end = [], count
    while end:
        if chosen[end] < end:
            spans.append((chosen[end], end))
        end = min(chosen[end], end - 1)
    return spans[::-1] or [(0, count)]


def _level(curve: Curve, begin: int, end: int) -> float:
    return median(log(seconds) for _, seconds in curve[begin:end])


def _distance(values: np.ndarray) -> float:
    return float(np.minimum(OUTLIER, np.abs(values - np.sort(values)[len(values) // 2])).sum())


def _merged(curve: Curve, spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Neighbours of nearly one level as one, and none that is below the one before."""
    merged: list[tuple[int, int]] = []
    for span in spans:
        while merged and not _distinct(curve, merged[-1], span):
            span = (merged.pop()[0], span[1])
        merged.append(span)
    return merged


def _distinct(curve: Curve, lower: tuple[int, int], upper: tuple[int, int]) -> bool:
    """Whether the second is a level above the first, and not the same one with noise."""
    step = _level(curve, *upper) - _level(curve, *lower)
    return step >= log(LEAST_RATIO) or (
        step >= log(FLAT_RATIO) and all(_unevenness(curve, *span) <= FLAT * step for span in (lower, upper))
    )


def _unevenness(curve: Curve, begin: int, end: int) -> float:
    level = _level(curve, begin, end)
    return sum(abs(log(seconds) - level) for _, seconds in curve[begin:end]) / (end - begin)


def _exceeded(curve: Curve, begin: int, end: int, level: float, following: float) -> float:
    """The working set after which the latency stays above ABOVE of the way to the next level: between two points, the
    first from the plateau's last on that is above with the one after it, or, where the plateau's own last points are
    already above, the first of those."""
    limit = level + ABOVE * (following - level)
    above = [seconds > limit for _, seconds in curve]
    at = end - 1
    while at > begin and above[at]:
        at -= 1
    while at + 2 < len(curve) and not (above[at + 1] and above[at + 2]):
        at += 1
    (before, low), (after, high) = curve[at], curve[min(at + 1, len(curve) - 1)]
    share = (limit - low) / (high - low) if high > limit > low else 0.0
    return float(before * (after / before) ** share)
