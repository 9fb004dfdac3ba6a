"""BLAS levels 1, 2 and 3 under one roofline: y += a·x, a matrix by a vector, a matrix by a matrix.

SAXPY is timed by the width of its loads too, in loops of our own (probes.cpp) on a CPU; everything else is torch's.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from armillary.kernels.core.random_inputs import random_row
from armillary.profiling.ceilings.settings import Settings
from armillary.profiling.memory.probes import probes

WIDTHS = (4, 8, 16, 32, 64)
"""bytes of a load"""
_MIB = 1 << 20
_FP32 = 4


def cases(settings: Settings) -> list[dict[str, Any]]:
    """SAXPY from the first cache and from memory, GEMV and GEMM from small to large."""
    large = max(4 * settings.cache_bytes, 64 * _MIB) if not settings.quick else 32 * _MIB
    by_width = (
        []
        if settings.on_cuda
        else [
            {"op": "saxpy", "by": f"{8 * width}-bit loads", "bytes": size, "width": width}
            for size in (16 << 10, large)
            for width in WIDTHS
        ]
    )
    vectors = [{"op": "saxpy", "by": "torch", "bytes": size} for size in (16 << 10, large)]
    sizes = (256, 1024, 4096) if not settings.quick else (256, 1024)
    return [*by_width, *vectors, *({"op": op, "by": "torch", "n": n} for op in ("gemv", "gemm") for n in sizes)]


def work_of(case: dict[str, Any]) -> tuple[float, float]:
    """(FLOPs, bytes that must be moved) of one call, in fp32."""
    if case["op"] == "saxpy":
        count = case["bytes"] // (2 * _FP32)
        return 2.0 * count, 3.0 * _FP32 * count
    n = case["n"]
    if case["op"] == "gemv":
        return 2.0 * n * n, _FP32 * (n * n + 2.0 * n)
    return 2.0 * n**3, 3.0 * _FP32 * n * n


def measure(settings: Settings) -> Iterator[dict[str, Any]]:
    """A point per case: FLOP/s, bytes/s and FLOPs per byte."""
    for case in cases(settings):
        flops, moved = work_of(case)
        if "width" in case:
            seconds = _by_width(case, settings.budget_s)
        else:
            seconds = settings.time(_call(case, settings.device)).seconds
        yield {
            **case,
            "flops": flops / seconds,
            "bytes_per_s": moved / seconds,
            "beside": {"intensity": flops / moved, "date": time.strftime("%Y-%m-%d")},
        }


def _call(case: dict[str, Any], device: torch.device) -> Callable[[], object]:
    if case["op"] == "saxpy":
        count = case["bytes"] // (2 * _FP32)
        x, y = _vectors(count, device)
        return lambda: torch.add(y, x, alpha=0.5, out=y)
    n = case["n"]
    a = random_row(n * n, torch.float32, device, seed=3).view(n, n)
    b = random_row(n * n, torch.float32, device, seed=4).view(n, n)
    return partial(torch.mv, a, b[0]) if case["op"] == "gemv" else partial(torch.mm, a, b)


def _vectors(count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return random_row(count, torch.float32, device, seed=1), random_row(count, torch.float32, device, seed=2)


_CALL_S = 1e-3
"""how long the calls that are timed together take at least"""


def _by_width(case: dict[str, Any], budget_s: float) -> float:
    """Seconds of a call on one thread: the first quartile of some, each of many in a row."""
    count = case["bytes"] // (2 * _FP32)
    x, y = _vectors(count, torch.device("cpu"))

    def run(repeats: int) -> float:
        seconds: float = probes().armillary_saxpy(case["width"], 0.5, x.data_ptr(), y.data_ptr(), count, repeats)
        return seconds

    repeats = max(1, int(_CALL_S / max(run(2), 1e-9)))
    times, end = list[float](), time.perf_counter() + budget_s
    while len(times) < 5 or time.perf_counter() < end:
        times.append(run(repeats))
    return sorted(times)[len(times) // 4]
