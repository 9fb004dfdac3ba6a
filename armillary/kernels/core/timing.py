"""Timing: the median of many samples of a call, with the spread, on a CPU or a GPU.

Several calls that do the same work on different buffers are taken in turn, so that what one left in a cache is gone
when its turn comes again. A GPU is timed by events; calls that are too short for the host to keep up with are replayed
from a CUDA graph. A chip that runs into its power limit slows down within a tenth of a second, so bursts with rests
between them show what it can do, and one long look what it can keep up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice, pairwise
from math import ceil
from statistics import median, quantiles
from typing import Any

import torch

Call = Callable[[], object]
SAMPLE_S = 1e-3
"""a sample is at least this long: shorter ones measure the clock"""
MIN_SAMPLES, MAX_SAMPLES = 5, 400
_MAX_CALLS = 2000
GRAPH_BELOW_S = 50e-6
"""longer calls are launched one by one, as a program does it, and the host keeps ahead; a large copy has been seen
to be slower as a node of a graph (2.7 against 4.3 TB/s on an H200)"""
BURST_S = 0.025
"""work between two rests"""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """What repeated runs of one call took."""

    seconds: float
    """median of one call"""
    spread: float
    """interquartile range over the median"""
    samples: int
    """how many samples the median is of"""
    calls: int
    """calls in a sample"""
    method: str
    """how time was taken"""
    began: float
    """time.monotonic at the first sample"""
    ended: float
    """and after the last"""


def time_calls(
    calls: Sequence[Call], device: torch.device, *, budget_s: float, rest_s: float = 0.0, graph: bool | None = None
) -> Timing:
    """One call's time from about `budget_s` seconds of taking `calls` in turn, after a warm-up; a GPU rests for
    `rest_s` after every burst. `graph` says whether calls are captured; by default short ones are."""
    if device.type == "cuda":
        return _on_cuda(calls, device, budget_s, rest_s, graph)
    return _on_host(calls, budget_s)


def summary(samples: Sequence[float], *, calls: int, method: str, began: float) -> Timing:
    """Median and spread of samples that are seconds a call."""
    first, _, third = quantiles(samples, n=4) if len(samples) > 1 else (samples[0],) * 3
    middle = median(samples)
    return Timing(
        seconds=middle,
        spread=(third - first) / middle if middle else 0.0,
        samples=len(samples),
        calls=calls,
        method=method,
        began=began,
        ended=time.monotonic(),
    )


def calls_per_sample(once_s: float) -> int:
    return max(1, min(_MAX_CALLS, ceil(SAMPLE_S / max(once_s, 1e-9))))


def num_samples(once_s: float, calls: int, budget_s: float) -> int:
    return max(MIN_SAMPLES, min(MAX_SAMPLES, int(budget_s / max(once_s * calls, 1e-9))))


# --- on the host


def _on_host(calls: Sequence[Call], budget_s: float) -> Timing:
    for call in calls:
        call()
    turns = cycle(calls)
    once = _clocked(turns, 1)
    count = calls_per_sample(once)
    began = time.monotonic()
    samples = [_clocked(turns, count) / count for _ in range(num_samples(once, count, budget_s))]
    return summary(samples, calls=count, method="host clock", began=began)


def _clocked(turns: Any, count: int) -> float:
    begin = time.perf_counter()
    for call in islice(turns, count):
        call()
    return time.perf_counter() - begin


# --- on a GPU


def _on_cuda(calls: Sequence[Call], device: torch.device, budget_s: float, rest_s: float, graph: bool | None) -> Timing:
    turns = cycle(calls)
    _warm(turns, len(calls), device)
    once = _evented(lambda: _take(turns, len(calls)), 3)[-1] / len(calls)
    count = calls_per_sample(once)
    graph = once < GRAPH_BELOW_S if graph is None else graph
    run = _captured(turns, count) if graph else lambda: _take(turns, count)
    _evented(run, 2)
    began = time.monotonic()
    total = num_samples(once, count, budget_s)
    burst = max(1, round(BURST_S / (once * count))) if rest_s else total
    samples: list[float] = []
    while len(samples) < total:
        time.sleep(rest_s)
        samples += _evented(run, min(burst, total - len(samples)))
    method = "events around graph replays" if graph else "events"
    return summary([sample / count for sample in samples], calls=count, method=method, began=began)


def _take(turns: Any, count: int) -> None:
    for call in islice(turns, count):
        call()


def _warm(turns: Any, count: int, device: torch.device) -> None:
    """On a side stream, as graph capture wants it: libraries set themselves up here."""
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        _take(turns, max(3, count))
    torch.cuda.current_stream(device).wait_stream(side)
    torch.cuda.synchronize(device)


def _captured(turns: Any, count: int) -> Call:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _take(turns, count)
    return lambda: graph.replay()


def _evented(run: Call, samples: int) -> list[float]:
    """Seconds of each run, all queued before any is waited for."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(samples + 1)]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) / 1e3 for begin, end in pairwise(marks)]
