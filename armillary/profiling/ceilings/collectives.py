"""Collectives between processes of this machine: time over sizes, bandwidths, and the alpha-beta model planners use.

Ranks are started here, gloo on a CPU and NCCL on GPUs. `bytes` is what nccl-tests calls the size: the full array,
gathered for all-gather and reduce-scatter, one rank's row for all-to-all. Algorithm bandwidth is bytes over time; bus
bandwidth is what each link carries (`wire_factor` of spec). The model is t = alpha + bytes / beta (Hockney
1994). Times span orders of magnitude, so relative errors are fitted; outliers, frequent on a shared machine, are
weighted down (Huber 1964).
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from armillary.errors import BadInput, unknown
from armillary.profiling.ceilings.ceilings import Watch, about, name_of
from armillary.profiling.ceilings.collective_ranks import OPS, Plan, Sample, run_ranks
from armillary.spec.arithmetic.non_gemm_ops import wire_factor
from armillary.store.peaks import Peaks, new_peaks

SIZES = tuple(1 << power for power in range(10, 27, 2))
QUICK_SIZES = (1 << 12, 1 << 18, 1 << 22)


@dataclass(frozen=True, kw_only=True)
class Collectives:
    """What was measured between ranks: points of kind collective (the model) and collective_time (each size)."""

    peaks: Peaks
    seconds: float


def default_worlds(device: torch.device, cores: int) -> tuple[int, ...]:
    """Two, four … as many as there are GPUs, or cores; two ranks at least."""
    most = torch.cuda.device_count() if device.type == "cuda" else max(2, cores)
    return tuple(1 << power for power in range(1, 7) if 1 << power <= most)


def measure_collectives(
    device: torch.device,
    *,
    worlds: Sequence[int],
    ops: Sequence[str] = tuple(OPS),
    sizes: Sequence[int] = SIZES,
    budget_s: float = 0.15,
    watch: Watch = lambda done, total, what: None,
) -> Collectives:
    """Time each operation at each size for each number of ranks, and fit the model."""
    _check(device, worlds, ops, sizes)
    begin = time.monotonic()
    peaks = new_peaks(name_of(device), about(device))
    total = len(worlds) * len(ops) * len(sizes)
    for number, world in enumerate(worlds):
        plan = Plan(device=device.type, world=world, ops=tuple(ops), sizes=tuple(sorted(sizes)), budget_s=budget_s)
        samples = []
        watch(number * len(ops) * len(sizes), total, f"starting {world} ranks")
        for sample in run_ranks(plan):
            samples.append(sample)
            watch(number * len(ops) * len(sizes) + len(samples), total, f"{sample.op} × {world}")
        peaks = peaks.with_points("collective_time", [_time_point(sample, plan) for sample in samples])
        peaks = peaks.with_points("collective", _models(samples, plan))
    return Collectives(peaks=peaks, seconds=time.monotonic() - begin)


def _check(device: torch.device, worlds: Sequence[int], ops: Sequence[str], sizes: Sequence[int]) -> None:
    for op in ops:
        if op not in OPS:
            raise unknown("collective", op, OPS)
    if len(set(sizes)) < 2 or min(sizes) < 1:
        raise BadInput("a latency and a bandwidth need two sizes at least; give two different ones")
    for world in worlds:
        if world < 2:
            raise BadInput(f"{world} rank has nobody to talk to; use --world 2 or more")
        if device.type == "cuda" and world > torch.cuda.device_count():
            gpus = torch.cuda.device_count()
            raise BadInput(f"{world} ranks need {world} GPUs and there are {gpus}; use fewer, or --device cpu")


def _time_point(sample: Sample, plan: Plan) -> dict[str, Any]:
    tried = {"op": sample.op, "world": plan.world, "backend": plan.backend, "bytes": sample.bytes}
    rate = sample.bytes / sample.seconds
    bus = rate * wire_factor(sample.op, plan.world)  # type: ignore[arg-type]
    seen = {"spread": sample.spread, "samples": sample.samples, "algorithm_bytes_per_s": rate, "bus_bytes_per_s": bus}
    return {**tried, "seconds": sample.seconds, "beside": {**seen, "date": time.strftime("%Y-%m-%d")}}


def _models(samples: Sequence[Sample], plan: Plan) -> Iterator[dict[str, Any]]:
    """One alpha-beta model per operation; beta is algorithm bandwidth."""
    for op in plan.ops:
        of_op = [sample for sample in samples if sample.op == op]
        model = fit([sample.bytes for sample in of_op], [sample.seconds for sample in of_op])
        bus = model.bytes_per_s * wire_factor(op, plan.world)  # type: ignore[arg-type]
        yield {
            "op": op,
            "world": plan.world,
            "backend": plan.backend,
            "alpha_s": model.alpha_s,
            "bytes_per_s": model.bytes_per_s,
            "beside": {"error": model.error, "bus_bytes_per_s": bus, "date": time.strftime("%Y-%m-%d")},
        }


_ROUNDS = 30
_HUBER = 1.345
"""residuals beyond this many standard deviations lose weight; 95 % efficient on clean data"""


@dataclass(frozen=True, kw_only=True)
class AlphaBeta:
    """Start-up time, asymptotic bandwidth (beta), and the median relative error of the fit."""

    alpha_s: float
    bytes_per_s: float
    error: float


def fit(num_bytes: Sequence[float], seconds: Sequence[float]) -> AlphaBeta:
    """Robust weighted least squares with alpha ≥ 0; needs two different sizes."""
    assert len(set(num_bytes)) >= 2, "a line needs two sizes"
    size, time = np.asarray(num_bytes, float), np.asarray(seconds, float)
    weight = np.ones_like(size)
    for _ in range(_ROUNDS):
        alpha, slope = _solve(size, time, weight)
        off = np.abs((alpha + slope * size - time) / time)
        scale = float(np.median(off)) / 0.6745 + 1e-12
        weight = 1 / np.maximum(1.0, off / scale / _HUBER)
    return AlphaBeta(alpha_s=alpha, bytes_per_s=1 / slope, error=float(np.median(off)))


def _solve(size: np.ndarray, time: np.ndarray, weight: np.ndarray) -> tuple[float, float]:
    """Least squares of relative errors; where alpha or the slope would be negative, the nearest line without that."""
    scale = np.sqrt(weight) / time
    columns = np.stack([scale, size * scale], axis=1)
    norm = np.linalg.norm(columns, axis=0)
    (alpha, slope), *_ = np.linalg.lstsq(columns / norm, np.sqrt(weight), rcond=None)
    alpha, slope = float(alpha / norm[0]), float(slope / norm[1])
    if alpha < 0:
        through_zero = columns[:, 1]
        return 0.0, float(through_zero @ np.sqrt(weight) / (through_zero @ through_zero))
    if slope <= 0:  # flat: start-up is all there is, and the largest size bounds the bandwidth from below
        largest = int(np.argmax(size))
        return 0.0, float(time[largest] / size[largest])
    return alpha, slope
