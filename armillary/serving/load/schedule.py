"""The requests of a test as send times and lengths, from [traffic] or from a recorded trace.

Gaps of mean 1 are sampled first and scaled by the rate: a request is sent when the integral of the rate has grown by
its gap, so that bursts and ramps combine. The number of requests is fixed to that integral (a Poisson process given its
count), so that a short test offers exactly its rate.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from math import exp, log1p, sqrt
from pathlib import Path
from random import Random

from armillary.errors import BadInput
from armillary.serving.load.record import PlannedRequest
from armillary.serving.load.trace import read_trace
from armillary.spec.tables.traffic import Load, Traffic

_MAX_WARMUP_S = 10.0
_LONG_SEED = 1 << 20
"""the second stream's arrivals are independent of the first's"""


def warmup_s(traffic: Traffic, load: Load) -> float:
    """load.warmup_s, or a tenth of the test, at most 10 s."""
    return min(_MAX_WARMUP_S, traffic.duration_s / 10) if load.warmup_s is None else load.warmup_s


def planned_requests(traffic: Traffic, load: Load, *, seed: int) -> list[PlannedRequest]:
    """Requests of warm-up and test, of an open loop; a closed loop draws its requests from `lengths` when a client is
    free."""
    if load.trace:
        if traffic.long_requests_per_s:
            raise BadInput("a trace has all of its requests; leave load.trace or traffic.long_requests_per_s out")
        return _from_trace(traffic, load)
    assert load.concurrency is None, "a closed loop draws its requests as it runs"
    warm, draw = warmup_s(traffic, load), lengths(traffic, load, seed)
    warmup = send_times(traffic, seconds=warm, seed=seed)
    test = send_times(traffic, seconds=traffic.duration_s, ramp_to=load.ramp_to, count=load.requests, seed=seed + 1)
    times = warmup + [warm + at for at in test]
    rows = [
        PlannedRequest(at_s=at, tokens_in=tokens_in, tokens_out=tokens_out)
        for at, (tokens_in, tokens_out) in ((at, draw()) for at in times)
    ]
    seconds = warm + (traffic.duration_s if load.requests is None else test[-1])
    return sorted(rows + _long_requests(traffic, seconds, seed), key=lambda row: row.at_s or 0.0)


def _long_requests(traffic: Traffic, seconds: float, seed: int) -> list[PlannedRequest]:
    """The second stream, beside warm-up and test of the first."""
    return [
        PlannedRequest(at_s=at, tokens_in=stream.tokens_in, tokens_out=stream.tokens_out, is_long=True)
        for stream in traffic.streams[1:]
        for at in send_times(stream, seconds=seconds, seed=seed + _LONG_SEED)
    ]


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
    return sorted(min(seconds, _time_of(position, begin, end, seconds)) for position in areas)  # rounding may swap two


def _areas(traffic: Traffic, area: float, rng: Random) -> list[float]:
    """Positions of the requests between 0 and `area`, one per unit."""
    count = round(area)
    if traffic.arrival == "constant":
        return [(i + 0.5) * area / count for i in range(count)]
    variance = traffic.burstiness**2  # of a gap of mean 1, as burstiness is its coefficient of variation
    gaps = (
        rng.expovariate(1.0) if traffic.arrival == "poisson" else rng.gammavariate(1 / variance, variance)
        for _ in range(count + 1)
    )
    sums = list(accumulate(gaps))
    return [position * area / sums[-1] for position in sums[:-1]]


def _time_of(area: float, begin: float, end: float, seconds: float) -> float:
    """When begin·t + (end − begin)·t² / (2·seconds) reaches `area`."""
    if begin == end:
        return area / begin
    rise = (end - begin) / seconds
    return 2 * area / (begin + sqrt(max(0.0, begin * begin + 2 * rise * area)))


def _from_trace(traffic: Traffic, load: Load) -> list[PlannedRequest]:
    """The beginning of the trace, for warm-up and test, with load.trace_speed and load.longest applied."""
    rows = [replace(row, at_s=(row.at_s or 0.0) / load.trace_speed) for row in read_trace(Path(load.trace))]
    warm = warmup_s(traffic, load)
    last = warm + traffic.duration_s
    rows = [row for row in rows if (row.at_s or 0.0) < last]
    if load.requests is not None:
        before = sum((row.at_s or 0.0) < warm for row in rows)
        rows = rows[: before + load.requests]
    if not any((row.at_s or 0.0) >= warm for row in rows):
        raise BadInput(f"{load.trace} has no request after the warm-up of {warm:g} s; try --set load.warmup_s=0")
    return [_shortened(row, load.longest) for row in rows]


def _shortened(row: PlannedRequest, longest: int | None) -> PlannedRequest:
    """Prompt and completion shortened in proportion, to `longest` tokens together."""
    both = row.tokens_in + row.tokens_out
    if longest is None or both <= longest:
        return row
    tokens_out = min(max(1, row.tokens_out * longest // both), longest - 1)
    return replace(row, tokens_in=longest - tokens_out, tokens_out=tokens_out)


def lengths(traffic: Traffic, load: Load, seed: int) -> Callable[[], tuple[int, int]]:
    """Draws (prompt, completion) lengths: lognormal with the means of [traffic], at most ten times those."""
    if not load.length_spread:
        return lambda: (traffic.tokens_in, traffic.tokens_out)
    rng, sigma = Random(f"lengths {seed}"), sqrt(log1p(load.length_spread**2))

    def draw(mean: int, low: int) -> int:
        return max(low, min(10 * mean, round(mean * exp(rng.gauss(-sigma * sigma / 2, sigma)))))

    return lambda: (draw(traffic.tokens_in, traffic.shared_prefix or 1), draw(traffic.tokens_out, 1))


def num_shortened(rows: Sequence[PlannedRequest], load: Load) -> int:
    """Number of the trace's requests that were shortened to load.longest."""
    if not load.trace or load.longest is None:
        return 0
    recorded = read_trace(Path(load.trace))
    return sum(row.tokens_in + row.tokens_out > load.longest for row in recorded[: len(rows)])
