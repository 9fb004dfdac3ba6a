"""A probe of well under a second: GEMM, a decode step's GEMM and attention in fp32, bf16 and fp16.

Feature flags say what to expect: a dtype without units is tried on one small GEMM first, and no further where that
shows it to be emulated (one call at full size would take seconds there).
"""

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

from armillary.kernels.core.dtype import DTYPES as TORCH_DTYPES
from armillary.machine.device_name import device_name
from armillary.machine.features import has_native
from armillary.profiling.dtypes.rates import DTYPES, PROBE, RunShape
from armillary.spec.precision import EMULATED
from armillary.store.peaks import Peaks, new_peaks

SMALL = (64, 256, 256)
"""the GEMM that shows emulation: 8 MFLOP, 33 ms at the slowest rate seen (0.25 GFLOP/s)"""
LOOK_S = 0.03
"""how long a case is timed, beyond its first call"""
MOST = 1024
"""sizes of a GEMM are no larger: what matters is how dtypes compare"""
DECODE_BYTES = 48 << 20
"""weights of the decode step: more than most last-level caches hold"""
ROUNDS = 3
"""most rounds, where a dtype for which the CPU has units looks slower than fp32: other work may have been in the way,
and what is found here is kept"""


def probe(device: str, shape: RunShape) -> Peaks:
    """Points of kind PROBE, one per dtype, under the device's name."""
    where = torch.device(device)
    points = _round(where, shape)
    for _ in range(ROUNDS - 1):
        if where.type == "cpu" and _is_odd(points):
            points = [_faster(*pair) for pair in zip(points, _round(where, shape), strict=True)]
    return new_peaks(device_name(where)).with_points(PROBE, points)  # how dtypes compare is the same on fewer threads


def _is_odd(points: list[dict[str, Any]]) -> bool:
    """Whether a dtype with units of its own was slower than the first, fp32."""
    return any(has_native(point["dtype"]) and point["flops"] < points[0]["flops"] for point in points)


def _faster(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """The higher of each rate."""
    return {key: max(value, second[key]) if isinstance(value, float) else value for key, value in first.items()}


def _round(where: torch.device, shape: RunShape) -> list[dict[str, Any]]:
    """A point per dtype."""
    wide: dict[str, Any] = {}
    points = []
    for dtype in DTYPES:
        with onednn_kept():
            point = _look(dtype, where, shape, wide)
        wide = wide or point
        points.append({key: value for key, value in point.items() if key != "small"})
    return points


def _look(dtype: str, device: torch.device, shape: RunShape, wide: dict[str, Any]) -> dict[str, Any]:
    """Rates of one dtype; only the small GEMM's where that shows it to be emulated."""
    small = _gemm_rate(*SMALL, dtype, device)
    suspected = wide and (device.type != "cpu" or not has_native(dtype))
    if suspected and small < EMULATED * wide["small"]:
        return {"dtype": dtype, "flops": small, "small": small, "emulated": True}
    m, n, k = (min(MOST, size) for size in (shape.rows, shape.ffn, shape.hidden))
    gemm = _gemm_rate(max(m, SMALL[0]), n, k, dtype, device)
    return {
        "dtype": dtype,
        "flops": gemm,
        "small": small,
        "decode": _decode_rate(dtype, device),
        "attention": _attention_rate(shape, dtype, device),
    }


def _gemm_rate(m: int, n: int, k: int, dtype: str, device: torch.device) -> float:
    a, b = (torch.ones(size, dtype=TORCH_DTYPES[dtype], device=device) for size in ((m, k), (k, n)))
    return 2.0 * m * n * k / _seconds(lambda: a @ b, device)


def _decode_rate(dtype: str, device: torch.device) -> float:
    """One row against weights that no cache holds."""
    size, kind = 2048, TORCH_DTYPES[dtype]
    count: int = max(2, DECODE_BYTES // (size * size * kind.itemsize))
    weights, row = (torch.ones(*shape, size, dtype=kind, device=device) for shape in ((count, size), (1,)))
    seconds = _seconds(lambda: [F.linear(row, weight) for weight in weights], device)
    return 2.0 * count * size * size / seconds


def _attention_rate(shape: RunShape, dtype: str, device: torch.device) -> float:
    keys, heads = min(512, shape.keys), 4
    q, k, v = (torch.ones(1, heads, keys, shape.head_dim, dtype=TORCH_DTYPES[dtype], device=device) for _ in range(3))
    flops = 2.0 * heads * keys * keys * shape.head_dim  # causal: half of the pairs, two GEMMs
    return flops / _seconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), device)


def _seconds(call: Callable[[], Any], device: torch.device) -> float:
    """The quickest of a few calls; the first one warms up, and is the only one where it took long."""
    best, end = _timed(call, device), time.perf_counter() + LOOK_S
    if best > LOOK_S:
        return best
    best = _timed(call, device)
    while time.perf_counter() < end:
        best = min(best, _timed(call, device))
    return best


def _timed(call: Callable[[], Any], device: torch.device) -> float:
    begin = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return max(time.perf_counter() - begin, 1e-9)


@contextmanager
def onednn_kept() -> Iterator[None]:
    """Around GEMMs in a dtype that the CPU may have no units for: torch's warning is dropped, oneDNN stays on.

    On ARM without bf16 units one bf16 GEMM makes torch switch oneDNN off for good, and everything measured later in
    that process, fp32 too, would be several times too slow (torch 2.13, ATen/native/LinearAlgebra.cpp).
    """
    onednn = torch.backends.mkldnn
    before = onednn.enabled
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*mkldnn.*")
            yield
    finally:
        onednn.enabled = before
