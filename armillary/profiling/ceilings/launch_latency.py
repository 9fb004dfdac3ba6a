"""Launch overhead of an operation: eager, in a CUDA graph, and as a round trip.

A step of thousands of small operations is bound by it, however fast the device computes.
"""

import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from armillary.kernels.core.random_inputs import random_row
from armillary.kernels.core.timing import Timing, summary
from armillary.profiling.ceilings.settings import Settings

_ELEMENTS = 1024
_LAUNCHES = 1000


def cases(settings: Settings) -> list[dict[str, Any]]:
    """Eager everywhere; graph and round trip on a GPU."""
    return [{"mode": mode} for mode in (("eager", "graph", "round_trip") if settings.on_cuda else ("eager",))]


def measure(chosen: Iterable[dict[str, Any]], settings: Settings) -> Iterator[tuple[str, dict[str, Any]]]:
    """Eager: a thousand negations and one synchronisation. Graph: negations replayed, each after the one before. Round
    trip: one negation and a synchronisation, the least that `.item()` costs."""
    for case in chosen:
        row = random_row(_ELEMENTS, torch.float32, settings.device)
        if case["mode"] == "graph":
            timing = settings.time(row.neg_)
        elif case["mode"] == "eager":
            timing = _host_clocked(row, settings, _LAUNCHES, "host clock")
        else:
            timing = _host_clocked(row, settings, 1, "host clock, device waited for")
        yield "launch", settings.point(case, timing, {"seconds": timing.seconds})


def _host_clocked(row: Any, settings: Settings, count: int, method: str) -> Timing:
    samples: list[float] = []
    began = time.monotonic()
    while len(samples) < 20 or (time.monotonic() - began < settings.budget_s and len(samples) < 2000):
        begin = time.perf_counter()
        for _ in range(count):
            row.neg_()
        if settings.on_cuda:
            torch.cuda.synchronize(settings.device)
        samples.append((time.perf_counter() - begin) / count)
    return summary(samples[1:], calls=count, method=method, began=began)
