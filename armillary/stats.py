"""Percentiles and confidence intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, sqrt

# Student's t, two-sided 95 %, by degrees of freedom (any table of it)
_T95 = (
    12.706,
    4.303,
    3.182,
    2.776,
    2.571,
    2.447,
    2.365,
    2.306,
    2.262,
    2.228,
    2.201,
    2.179,
    2.160,
    2.145,
    2.131,
    2.120,
    2.110,
    2.101,
    2.093,
    2.086,
    2.080,
    2.074,
    2.069,
    2.064,
    2.060,
    2.056,
    2.052,
    2.048,
    2.045,
    2.042,
)
_T95_FAR = 1.96


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of all do not exceed (nearest rank); 0 where there is none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[max(0, ceil(len(ordered) * percent / 100) - 1)]


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean over repeats, and how far the true mean may be off."""

    mean: float
    """over the repeats"""
    half_width: float | None = None
    """of the 95 % confidence interval (Student's t); none for a single run"""

    @property
    def low(self) -> float:
        return self.mean - (self.half_width or 0.0)

    @property
    def high(self) -> float:
        return self.mean + (self.half_width or 0.0)


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and interval of a figure that was measured once a repeat."""
    count = len(values)
    mean = sum(values) / count
    if count < 2:
        return Estimate(mean=mean)
    deviation = sqrt(sum((value - mean) ** 2 for value in values) / (count - 1))
    factor = _T95[count - 2] if count - 2 < len(_T95) else _T95_FAR
    return Estimate(mean=mean, half_width=factor * deviation / sqrt(count))


def slope(times: Sequence[float], values: Sequence[float]) -> float:
    """Of the straight line nearest to the points, a second; 0 for fewer than three."""
    if len(times) < 3:
        return 0.0
    mid_t, mid_v = sum(times) / len(times), sum(values) / len(values)
    spread = sum((t - mid_t) ** 2 for t in times)
    return sum((t - mid_t) * (v - mid_v) for t, v in zip(times, values, strict=True)) / spread if spread else 0.0
