"""Launch overhead of an operation: eager, in a CUDA graph, and as a round trip.

A step of thousands of small operations is bound by it, however fast the device computes.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from armillary.kernels.core.random_inputs import random_row
from armillary.kernels.core.timing import Timing, summary
from armillary.profiling.ceilings.settings import Settings

_ELEMENTS = 1024
_LAUNCHES = 1000


def cases(settings: Settings) -> list[dict[str, Any]]:
    """Eager everywhere; graph and round trip on a GPU."""
    return [{"mode": mode} for mode in (_MODES if settings.on_cuda else ("eager",))]


def measure(chosen: Iterable[dict[str, Any]], settings: Settings) -> Iterator[tuple[str, dict[str, Any]]]:
    for case in chosen:
        row = random_row(_ELEMENTS, torch.float32, settings.device)
        timing = _MODES[case["mode"]](row, settings)
        yield "launch", settings.point(case, timing, {"seconds": timing.seconds})


def _eager(row: Any, settings: Settings) -> Timing:
    """A thousand negations and one synchronisation: how fast the host can launch them."""
    return _host_clocked(row, settings, _LAUNCHES, "host clock")


def _round_trip(row: Any, settings: Settings) -> Timing:
    """One negation and a synchronisation: the least that `.item()` costs."""
    return _host_clocked(row, settings, 1, "host clock, device waited for")


def _graph(row: Any, settings: Settings) -> Timing:
    """Negations replayed from a CUDA graph, each after the one before."""
    return settings.time(lambda: row.neg_())


_MODES: dict[str, Callable[[Any, Settings], Timing]] = {"eager": _eager, "graph": _graph, "round_trip": _round_trip}


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
