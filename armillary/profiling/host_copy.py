"""Copies between host and device, from pageable and from pinned memory, over sizes.

Pageable memory goes through the driver's own buffer and holds the host up; pinned memory is read by the device itself.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from armillary.kernels.random_data import random_row
from armillary.kernels.timing import Timing, calls_per_sample, num_samples, summary
from armillary.profiling.settings import Settings

_KIB = 1 << 10
_SIZES = (64 * _KIB, 1024 * _KIB, 16 * 1024 * _KIB, 256 * 1024 * _KIB)
DIRECTIONS = ("to_device", "to_host")


def cases(settings: Settings) -> list[dict[str, Any]]:
    """None on a CPU."""
    if not settings.on_cuda:
        return []
    sizes = _SIZES[-1:] if settings.quick else _SIZES
    return [
        {"direction": direction, "pinned": pinned, "bytes": size}
        for direction in DIRECTIONS
        for pinned in (False, True)
        for size in sizes
    ]


def measure(chosen: Iterable[dict[str, Any]], settings: Settings) -> Iterator[tuple[str, dict[str, Any]]]:
    for case in chosen:
        host = random_row(case["bytes"] // 4, torch.float32, torch.device("cpu"))
        host = host.pin_memory() if case["pinned"] else host
        device = random_row(case["bytes"] // 4, torch.float32, settings.device, seed=1)
        target, source = (device, host) if case["direction"] == "to_device" else (host, device)
        timing = _timed(target, source, settings)
        yield "host_copy", settings.point(case, timing, {"bytes_per_s": case["bytes"] / timing.seconds})


def _timed(target: Any, source: Any, settings: Settings) -> Timing:
    once = _copies(target, source, 3, settings) / 3
    count = calls_per_sample(once)
    began = time.monotonic()
    total = num_samples(once, count, settings.budget_s)
    samples = [_copies(target, source, count, settings) / count for _ in range(total)]
    return summary(samples, calls=count, method="host clock, device waited for", began=began)


def _copies(target: Any, source: Any, count: int, settings: Settings) -> float:
    torch.cuda.synchronize(settings.device)
    begin = time.perf_counter()
    for _ in range(count):
        target.copy_(source, non_blocking=True)
    torch.cuda.synchronize(settings.device)
    return time.perf_counter() - begin
