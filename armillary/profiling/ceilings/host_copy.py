"""Copies between host and device, from pageable and from pinned memory, over sizes; and AdamW on the host.

Pageable memory goes through the driver's staging buffer and blocks the host; pinned memory is read by the device.
What offloading costs depends on both.
"""

import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from armillary.kernels.core.random_inputs import random_row
from armillary.kernels.core.timing import Timing, calls_per_sample, num_samples, summary
from armillary.profiling.ceilings.settings import Settings

_KIB = 1 << 10
_SIZES = (64 * _KIB, 1024 * _KIB, 16 * 1024 * _KIB, 256 * 1024 * _KIB)
DIRECTIONS = ("to_device", "to_host")
ADAMW, _ADAMW_BYTES = "adamw", 28
"""bytes per parameter of AdamW on the host: weight, gradient and two moments read, all but the gradient written"""


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
    ] + [{"direction": ADAMW, "pinned": False, "bytes": _ADAMW_BYTES << (24 if settings.quick else 26)}]


def measure(chosen: Iterable[dict[str, Any]], settings: Settings) -> Iterator[tuple[str, dict[str, Any]]]:
    for case in chosen:
        timing = time_adamw(case["bytes"] // _ADAMW_BYTES) if case["direction"] == ADAMW else _timed(case, settings)
        yield "host_copy", settings.point(case, timing, {"bytes_per_s": case["bytes"] / timing.seconds})


def time_adamw(count: int, samples: int = 3) -> Timing:
    """torch's fused step of `count` parameters on the host, by all threads but the two that a trainer needs."""
    before, began = torch.get_num_threads(), time.monotonic()
    torch.set_num_threads(max(1, before - 2))
    try:
        return summary(_adamw_steps(count, samples), calls=1, method="host clock", began=began)
    finally:
        torch.set_num_threads(before)


def _adamw_steps(count: int, samples: int) -> list[float]:
    parts = [[torch.linspace(0.1, top, count)] for top in (1.0, 2.0, 3.0, 4.0)]
    seconds = []
    for _ in range(samples + 1):
        begin = time.perf_counter()
        torch._fused_adamw_(
            *parts,
            [],
            [torch.ones(())],
            lr=1e-4,
            beta1=0.9,
            beta2=0.95,
            weight_decay=0.1,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )
        seconds.append(time.perf_counter() - begin)
    return seconds[1:]


def _timed(case: dict[str, Any], settings: Settings) -> Timing:
    host = random_row(case["bytes"] // 4, torch.float32, torch.device("cpu"))
    host = host.pin_memory() if case["pinned"] else host
    device = random_row(case["bytes"] // 4, torch.float32, settings.device, seed=1)
    target, source = (device, host) if case["direction"] == "to_device" else (host, device)
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
