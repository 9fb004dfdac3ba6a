"""Timing of calls: the median of many samples, with the spread, on a CPU or a GPU.

Several calls that do the same work on different buffers are cycled through, so that no call finds its buffers still in
a cache. A GPU is timed by events; calls that are too short for the CPU to keep up with are replayed from a CUDA graph.
A GPU that reaches its power limit slows down within a tenth of a second, so bursts with rests between them show its
peak speed, and one long run its sustained speed.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice, pairwise
from math import ceil
from statistics import median, quantiles

import torch

Call = Callable[[], object]
SAMPLE_S = 1e-3  # shortest sample: shorter ones measure the clock
MIN_SAMPLES, MAX_SAMPLES = 5, 400
_MAX_CALLS = 2000
# longer calls are launched one by one, as a program launches them, and the CPU keeps ahead; a large copy was slower as
# a node of a graph (2.7 against 4.3 TB/s on an H200)
GRAPH_BELOW_S = 50e-6
BURST_S = 0.025  # work between two rests


@dataclass(frozen=True, kw_only=True)
class Timing:
    """The time of one call, from repeated runs."""

    seconds: float  # median
    spread: float  # interquartile range over the median
    samples: int
    calls: int  # per sample
    method: str
    began: float  # time.monotonic at the first sample
    ended: float  # time.monotonic after the last sample


def time_calls(
    calls: Sequence[Call], device: torch.device, *, budget_s: float, rest_s: float = 0.0, graph: bool | None = None
) -> Timing:
    """The time of one call, from about `budget_s` seconds of cycling through `calls`, after a warm-up; a GPU rests for
    `rest_s` after every burst. `graph` says whether calls are captured; by default short ones are."""
    return _on_cuda(calls, device, budget_s, rest_s, graph) if device.type == "cuda" else _on_host(calls, budget_s)


def summary(samples: Sequence[float], *, calls: int, method: str, began: float) -> Timing:
    """Median and spread of samples, which are seconds per call."""
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


def _on_host(calls: Sequence[Call], budget_s: float) -> Timing:
    for call in calls:
        call()
    cycled = cycle(calls)
    once = _clocked(cycled, 1)
    count = calls_per_sample(once)
    began = time.monotonic()
    samples = [_clocked(cycled, count) / count for _ in range(num_samples(once, count, budget_s))]
    return summary(samples, calls=count, method="host clock", began=began)


def _clocked(cycled: Iterator[Call], count: int) -> float:
    begin = time.perf_counter()
    _run(cycled, count)
    return time.perf_counter() - begin


def _on_cuda(calls: Sequence[Call], device: torch.device, budget_s: float, rest_s: float, graph: bool | None) -> Timing:
    cycled = cycle(calls)
    warm_up(lambda: _run(cycled, max(3, len(calls))), device)
    once = _evented(lambda: _run(cycled, len(calls)), 3)[-1] / len(calls)
    count = calls_per_sample(once)
    graph = once < GRAPH_BELOW_S if graph is None else graph
    run = _captured(cycled, count) if graph else lambda: _run(cycled, count)
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


def _run(cycled: Iterator[Call], count: int) -> None:
    for call in islice(cycled, count):
        call()


def warm_up(run: Call, device: torch.device) -> None:
    """Run once on a side stream, as graph capture requires: compilers and libraries initialise themselves here."""
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream(device).wait_stream(side)
    torch.cuda.synchronize(device)


def _captured(cycled: Iterator[Call], count: int) -> Call:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _run(cycled, count)
    return lambda: graph.replay()


def _evented(run: Call, samples: int) -> list[float]:
    """Seconds of each run; all runs are queued before any is waited for."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(samples + 1)]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) / 1e3 for begin, end in pairwise(events)]
