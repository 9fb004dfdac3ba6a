"""Percentiles, confidence intervals, and running moments."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log, sqrt
from typing import NamedTuple


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


@dataclass(slots=True)
class LogMoments:
    """Count, sum and sum of squares of the logarithms of times in seconds: enough to compare two groups at constant
    memory. Latencies are skewed, their logarithms are nearly normal; a difference of mean logarithms is the logarithm
    of a ratio of geometric means."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    def add(self, seconds: float) -> None:
        value = log(max(seconds, 1e-6))
        self.count += 1
        self.total += value
        self.squares += value * value

    def plus(self, other: "LogMoments", sign: int = 1) -> "LogMoments":
        """Both together; with `sign` -1, what was added since `other` was copied."""
        return LogMoments(
            self.count + sign * other.count,
            self.total + sign * other.total,
            self.squares + sign * other.squares,
        )

    @property
    def mean(self) -> float:
        return self.total / self.count

    @property
    def variance(self) -> float:
        """Of one value, by the sample."""
        return max(0.0, self.squares - self.total * self.mean) / (self.count - 1)


class Slope(NamedTuple):
    """A trend per second, and its standard error."""

    slope: float
    error: float


def fitted_slope(times: Sequence[float], values: Sequence[float]) -> Slope:
    """The least-squares slope and its standard error, √(Σ residual² / (n − 2) / Σ (t − mean)²)."""
    growth, count = slope(times, values), len(times)
    mid_t, mid_v = sum(times) / count, sum(values) / count
    spread = sum((t - mid_t) ** 2 for t in times)
    left = sum((v - mid_v - growth * (t - mid_t)) ** 2 for t, v in zip(times, values, strict=True))
    return Slope(growth, sqrt(left / (count - 2) / spread) if count > 2 and spread else 0.0)
