"""The alpha-beta model of a collective: t = alpha + bytes / beta (Hockney 1994), fitted to measured times.

Times span orders of magnitude, so relative errors count: a plain fit would see the largest sizes only. Points that lie
far off, as on a shared machine some do, are weighted down (Huber 1964).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_ROUNDS = 30
_HUBER = 1.345
"""residuals beyond this many standard deviations lose weight; 95 % efficient on clean data"""


@dataclass(frozen=True, kw_only=True)
class AlphaBeta:
    """Start-up time and asymptotic bandwidth."""

    alpha_s: float
    """time of the smallest message"""
    bytes_per_s: float
    """beta: bytes a second of the largest messages"""
    error: float
    """median relative error of the fit"""

    def seconds(self, num_bytes: float) -> float:
        return self.alpha_s + num_bytes / self.bytes_per_s


def fit(num_bytes: Sequence[float], seconds: Sequence[float]) -> AlphaBeta:
    """Robust weighted least squares with alpha ≥ 0; needs two different sizes."""
    assert len(set(num_bytes)) >= 2, "a line needs two sizes"
    size, time = np.asarray(num_bytes, float), np.asarray(seconds, float)
    weight = np.ones_like(size)
    alpha = slope = 0.0
    for _ in range(_ROUNDS):
        alpha, slope = _solve(size, time, weight)
        off = np.abs((alpha + slope * size - time) / time)
        scale = float(np.median(off)) / 0.6745 + 1e-12
        weight = 1 / np.maximum(1.0, off / scale / _HUBER)
    off = np.abs((alpha + slope * size - time) / time)
    return AlphaBeta(alpha_s=alpha, bytes_per_s=1 / slope, error=float(np.median(off)))


def _solve(size: np.ndarray, time: np.ndarray, weight: np.ndarray) -> tuple[float, float]:
    """Least squares of relative errors; where the line would start below zero, or fall, the nearest that does not."""
    scale = np.sqrt(weight) / time
    columns = np.stack([scale, size * scale], axis=1)
    norm = np.linalg.norm(columns, axis=0)
    (alpha, slope), *_ = np.linalg.lstsq(columns / norm, np.sqrt(weight), rcond=None)
    alpha, slope = float(alpha / norm[0]), float(slope / norm[1])
    if alpha < 0:
        through_zero = columns[:, 1]
        return 0.0, float(through_zero @ np.sqrt(weight) / (through_zero @ through_zero))
    if slope <= 0:  # flat: start-up is all there is, and the largest size bounds the bandwidth from below
        largest = int(np.argmax(size))
        return 0.0, float(time[largest] / size[largest])
    return alpha, slope
