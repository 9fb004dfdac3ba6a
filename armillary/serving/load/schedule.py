"""The requests of a test as times and lengths: from [traffic], or from a recorded trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import exp, log1p, sqrt
from pathlib import Path
from random import Random

from armillary.errors import BadInput
from armillary.serving.load.arrivals import send_times
from armillary.serving.load.record import Planned
from armillary.serving.load.trace import read_trace
from armillary.spec.tables.load import Load
from armillary.spec.tables.serve import Traffic

_LONGEST_WARMUP_S = 10.0


def warmup_s(traffic: Traffic, load: Load) -> float:
    """Given, or a tenth of the test, at most 10 s."""
    return min(_LONGEST_WARMUP_S, traffic.duration_s / 10) if load.warmup_s is None else load.warmup_s


def planned(traffic: Traffic, load: Load, *, seed: int) -> list[Planned]:
    """Requests of warm-up and test; of a closed loop, whose clients take the next one when they are free, none: they
    are made by `lengths` as they are needed."""
    if load.trace:
        return _of_trace(traffic, load)
    assert load.concurrency is None, "a closed loop makes its requests as it goes"
    warm, draw = warmup_s(traffic, load), lengths(traffic, load, seed)
    steady = send_times(traffic, seconds=warm, seed=seed)
    test = send_times(traffic, seconds=traffic.duration_s, ramp_to=load.ramp_to, count=load.requests, seed=seed + 1)
    times = steady + [warm + at for at in test]
    return [
        Planned(at_s=at, tokens_in=tokens_in, tokens_out=tokens_out)
        for at, (tokens_in, tokens_out) in ((at, draw()) for at in times)
    ]


def _of_trace(traffic: Traffic, load: Load) -> list[Planned]:
    """The trace's first part, as long as warm-up and test last; faster and with shorter requests where asked."""
    rows = [replace(row, at_s=(row.at_s or 0.0) / load.trace_speed) for row in read_trace(Path(load.trace))]
    warm = warmup_s(traffic, load)
    last = warm + traffic.duration_s
    rows = [row for row in rows if (row.at_s or 0.0) < last]
    if load.requests is not None:
        before = sum((row.at_s or 0.0) < warm for row in rows)
        rows = rows[: before + load.requests]
    if not any((row.at_s or 0.0) >= warm for row in rows):
        raise BadInput(f"{load.trace} has no request after the warm-up of {warm:g} s; try --set load.warmup_s=0")
    return [_cut(row, load.longest) for row in rows]


def _cut(row: Planned, longest: int | None) -> Planned:
    """Prompt and answer shrunk alike, to `longest` tokens together."""
    both = row.tokens_in + row.tokens_out
    if longest is None or both <= longest:
        return row
    tokens_out = min(max(1, row.tokens_out * longest // both), longest - 1)
    return replace(row, tokens_in=longest - tokens_out, tokens_out=tokens_out)


def lengths(traffic: Traffic, load: Load, seed: int) -> Callable[[], tuple[int, int]]:
    """Draws (prompt, answer) lengths: lognormal with the means of [traffic], the longest ten times those."""
    if not load.length_spread:
        return lambda: (traffic.tokens_in, traffic.tokens_out)
    dice, sigma = Random(f"lengths {seed}"), sqrt(log1p(load.length_spread**2))

    def one(mean: int, low: int) -> int:
        return max(low, min(10 * mean, round(mean * exp(dice.gauss(-sigma * sigma / 2, sigma)))))

    return lambda: (one(traffic.tokens_in, traffic.shared_prefix or 1), one(traffic.tokens_out, 1))


def num_cut(rows: Sequence[Planned], load: Load) -> int:
    """Of a trace's requests that are sent, those that were shortened to load.longest."""
    if not load.trace or load.longest is None:
        return 0
    whole = read_trace(Path(load.trace))
    return sum(row.tokens_in + row.tokens_out > load.longest for row in whole[: len(rows)])
