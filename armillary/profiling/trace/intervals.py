"""Time intervals as numpy arrays: unions, intersections, coverage, and lengths in which overlap counts once."""

import numpy as np

from armillary.profiling.trace.trace import Array


def union(start: Array, end: Array) -> tuple[Array, Array]:
    """The union as disjoint intervals, in order."""
    nonempty = end > start
    start, end = start[nonempty], end[nonempty]
    if not len(start):
        return np.zeros(0), np.zeros(0)
    order = np.argsort(start, kind="stable")
    start, end = start[order], np.maximum.accumulate(end[order])
    first = np.concatenate(([True], start[1:] > end[:-1]))
    last = np.concatenate((first[1:], [True]))
    return start[first], end[last]


def length(start: Array, end: Array) -> float:
    """Time that is covered, overlap counted once."""
    first, last = union(start, end)
    return float((last - first).sum())


def clip(start: Array, end: Array, low: float, high: float) -> tuple[Array, Array]:
    return np.clip(start, low, high), np.clip(end, low, high)


def gaps_between(start: Array, end: Array, low: float, high: float) -> tuple[Array, Array]:
    """Parts of [low, high] that no interval covers."""
    first, last = union(*clip(start, end, low, high))
    begins, ends = np.concatenate(([low], last)), np.concatenate((first, [high]))
    nonempty = ends > begins
    return begins[nonempty], ends[nonempty]


def covered_within(start: Array, end: Array, low: Array, high: Array) -> Array:
    """How much of each [low, high] the intervals cover, overlap counted once."""
    first, last = union(start, end)
    return covered_before(first, last, high) - covered_before(first, last, low)


def covered_before(first: Array, last: Array, at: Array) -> Array:
    """How much time before `at` the intervals of a union cover."""
    if not len(first):
        return np.zeros(len(at))
    total = np.concatenate(([0.0], np.cumsum(last - first)))
    index = np.searchsorted(first, at, side="right")
    inside = np.where(index > 0, np.maximum(0.0, last[np.maximum(index - 1, 0)] - at), 0.0)
    return total[index] - inside


def exposed(start: Array, end: Array, hidden_start: Array, hidden_end: Array) -> tuple[Array, Array]:
    """Parts of a union that another union does not cover."""
    first, last = union(start, end)
    if not len(first):
        return first, last
    holes = gaps_between(hidden_start, hidden_end, float(first[0]), float(last[-1]))
    return _both(first, last, *holes)


def _both(a_start: Array, a_end: Array, b_start: Array, b_end: Array) -> tuple[Array, Array]:
    """The intersection of two unions."""
    cuts = np.unique(np.concatenate((a_start, a_end, b_start, b_end)))
    middle = (cuts[1:] + cuts[:-1]) / 2

    def inside(start: Array, end: Array) -> Array:
        index = np.searchsorted(start, middle, side="right") - 1
        return (index >= 0) & (end[np.maximum(index, 0)] > middle) if len(start) else np.zeros(len(middle), bool)

    both = inside(a_start, a_end) & inside(b_start, b_end)
    return cuts[:-1][both], cuts[1:][both]
