"""The measured rate of attention by length and head dim, where several lengths were measured."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from armillary.planning.device_model.vectorised_layouts import Array

if TYPE_CHECKING:  # the store's locks and sockets are slow to import
    from armillary.store.peaks import Peaks

Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True, kw_only=True)
class AttentionCurve:
    """Measured rate of one pass of attention, forward or backward: short sequences and small heads reach a fraction of
    what long ones do, which differs by kernel. Where several lengths were measured, as on CPUs, it replaces the
    formula."""

    lengths: Points
    """(keys, FLOP/s) at the most frequent head dim, shortest first"""
    dims: Points
    """(head dim, FLOP/s over that of the most frequent head dim), smallest first"""

    def flops(self, keys: Array, head_dim: float) -> Array:
        """FLOP/s by log-log interpolation; constant beyond the first and last point."""
        return _between(self.lengths, keys) * _between(self.dims, np.asarray(head_dim))


def measured_attention(
    measured: Peaks, share: float, dtypes: tuple[str, ...], *, backward: bool
) -> AttentionCurve | None:
    """The curve in the `dtypes`; None where fewer than two lengths were measured at every head dim."""
    best: dict[tuple[float, float], float] = {}
    for point in measured.points.get("attention", ()):
        if bool(point["backward"]) == backward and point["dtype"] in dtypes:
            where = float(point["keys"]), float(point["head_dim"])
            best[where] = max(best.get(where, 0.0), float(point["flops"]) * share)
    usual = Counter(dim for _, dim in best).most_common(1)[0][0] if best else 0.0
    lengths = tuple(sorted((keys, rate) for (keys, dim), rate in best.items() if dim == usual))
    if len(lengths) < 2:
        return None
    at = dict(lengths)
    dims = tuple(sorted((dim, rate / at[keys]) for (keys, dim), rate in best.items() if keys == lengths[0][0]))
    return AttentionCurve(lengths=lengths, dims=dims)


def _between(points: Points, where: Array) -> Array:
    x, y = np.log(np.array(points).T)
    return np.exp(np.interp(np.log(where), x, y))
