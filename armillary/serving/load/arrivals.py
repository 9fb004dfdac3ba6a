"""Send times of requests: constant, Poisson or gamma-distributed gaps, at a steady or ramped rate.

Gaps of mean 1 are sampled first and scaled by the rate: a request is sent when the integral of the rate has grown by
its gap, so that bursts and ramps combine. The number of requests is fixed to that integral (a Poisson process given its
count), so that a short test offers exactly its rate.
"""

from itertools import accumulate
from math import sqrt
from random import Random

from armillary.spec.tables.serve import Traffic


def send_times(
    traffic: Traffic, *, seconds: float, ramp_to: float | None = None, count: int | None = None, seed: int = 0
) -> list[float]:
    """Send times between 0 and `seconds`, while the rate ramps to `ramp_to`; `count` fixes the number of
    requests instead of the time."""
    begin, end = traffic.requests_per_s, ramp_to or traffic.requests_per_s
    area = seconds * (begin + end) / 2 if count is None else float(count)
    if count is not None:
        seconds = 2 * area / (begin + end)
    areas = _areas(traffic, area, Random(f"arrivals {seed}"))
    return [min(seconds, _time_of(position, begin, end, seconds)) for position in areas]


def _areas(traffic: Traffic, area: float, rng: Random) -> list[float]:
    """Positions of the requests between 0 and `area`, one per unit."""
    count = round(area)
    if traffic.arrival == "constant":
        return [(i + 0.5) * area / count for i in range(count)]
    sums = list(accumulate(_gap(traffic, rng) for _ in range(count + 1)))
    return [position * area / sums[-1] for position in sums[:-1]]


def _gap(traffic: Traffic, rng: Random) -> float:
    """A gap of mean 1; the shape of the gamma distribution is 1 / CV²."""
    if traffic.arrival == "poisson":
        return rng.expovariate(1.0)
    square = traffic.burstiness**2
    return rng.gammavariate(1 / square, square)


def _time_of(area: float, begin: float, end: float, seconds: float) -> float:
    """When begin·t + (end − begin)·t² / (2·seconds) reaches `area`."""
    if begin == end:
        return area / begin
    rise = (end - begin) / seconds
    return 2 * area / (begin + sqrt(max(0.0, begin * begin + 2 * rise * area)))
