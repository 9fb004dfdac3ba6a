"""When requests are sent: evenly, as a Poisson process, in gamma bursts, each at a steady or a ramped rate.

Gaps of mean 1 are drawn first and then stretched by the rate: a request is sent when the area under the rate has grown
by its gap, so bursts and ramps combine. There are exactly as many requests as the area holds: a Poisson process given
its count, so that a short test offers the rate it was asked for.
"""

from __future__ import annotations

from itertools import accumulate
from math import sqrt
from random import Random

from armillary.spec.tables.serve import Traffic


def send_times(
    traffic: Traffic, *, seconds: float, ramp_to: float | None = None, count: int | None = None, seed: int = 0
) -> list[float]:
    """Seconds, from 0 to `seconds`, at which requests are sent, while the rate goes to `ramp_to`; `count` of them ask
    for as long as they take instead."""
    begin, end = traffic.requests_per_s, ramp_to or traffic.requests_per_s
    area = seconds * (begin + end) / 2 if count is None else float(count)
    if count is not None:
        seconds = 2 * area / (begin + end)
    areas = _areas(traffic, area, Random(f"arrivals {seed}"))
    return [min(seconds, _time_of(one, begin, end, seconds)) for one in areas]


def _areas(traffic: Traffic, area: float, dice: Random) -> list[float]:
    """Where between 0 and `area` requests lie; about one for each 1 of it."""
    count = round(area)
    if traffic.arrival == "constant":
        return [(i + 0.5) * area / count for i in range(count)]
    whole = list(accumulate(_gap(traffic, dice) for _ in range(count + 1)))
    return [one * area / whole[-1] for one in whole[:-1]]


def _gap(traffic: Traffic, dice: Random) -> float:
    """A gap of mean 1; of a gamma distribution the shape is 1 / CV²."""
    if traffic.arrival == "poisson":
        return dice.expovariate(1.0)
    square = traffic.burstiness**2
    return dice.gammavariate(1 / square, square)


def _time_of(area: float, begin: float, end: float, seconds: float) -> float:
    """When begin·t + (end − begin)·t² / (2·seconds) reaches `area`."""
    if begin == end:
        return area / begin
    rise = (end - begin) / seconds
    return 2 * area / (begin + sqrt(max(0.0, begin * begin + 2 * rise * area)))
