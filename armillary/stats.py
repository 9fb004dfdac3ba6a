"""Percentiles and confidence intervals."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, sqrt


def percentile(values: Sequence[float], percent: float, weights: Sequence[float] | None = None) -> float:
    """Nearest rank: the smallest value that at least `percent` of all values do not exceed; 0 without values. With
    `weights`, a value counts as often as its weight says."""
    if not values:
        return 0.0
    if weights is None:
        ordered = sorted(values)
        return ordered[max(0, ceil(len(ordered) * percent / 100) - 1)]
    wanted, below = sum(weights) * percent / 100, 0.0
    for value, weight in sorted(zip(values, weights, strict=True)):
        below += weight
        if below >= wanted:
            return value
    return max(values)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean over repeats, and its confidence interval."""

    mean: float
    """mean of the repeats"""
    half_width: float | None = None
    """of the 95 % confidence interval (Student's t); none for a single run"""

    @property
    def low(self) -> float:
        return self.mean - (self.half_width or 0.0)

    @property
    def high(self) -> float:
        return self.mean + (self.half_width or 0.0)


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and interval of a figure that was measured once per repeat."""
    from scipy.special import stdtrit  # slow to import

    count = len(values)
    mean = sum(values) / count
    if count < 2:
        return Estimate(mean=mean)
    deviation = sqrt(sum((value - mean) ** 2 for value in values) / (count - 1))
    t = float(stdtrit(count - 1, 0.975))  # Student's t, two-sided 95 %
    return Estimate(mean=mean, half_width=t * deviation / sqrt(count))


def slope(times: Sequence[float], values: Sequence[float]) -> float:
    """Least-squares slope per second; 0 for fewer than three points."""
    if len(times) < 3:
        return 0.0
    mid_t, mid_v = sum(times) / len(times), sum(values) / len(values)
    spread = sum((t - mid_t) ** 2 for t in times)
    return sum((t - mid_t) * (v - mid_v) for t, v in zip(times, values, strict=True)) / spread if spread else 0.0
