"""Efficiency curves: the rate a chip reaches for a GEMM of some size, for attention, and for memory-bound operations.

A single efficiency would hide what matters: a short inner dimension, a partial last wave and a small array each cost.
The curves of a chip generation are in efficiency.toml; measured ceilings of this device replace them.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from armillary.errors import BadInput
from armillary.planning.device_model.attention_curve import AttentionCurve, measured_attention
from armillary.planning.device_model.vectorised_layouts import PRECISIONS, Array, Ints
from armillary.spec.hardware import Chip

if TYPE_CHECKING:  # the store's locks and sockets are slow to import
    from armillary.store.peaks import Peaks

TILE = 128 * 256
"""output elements per thread block of a large GEMM (cuBLAS and CUTLASS on Ampere and later)"""
HEAD_DIM, SEQUENCE = 24, 300
"""head dim and keys at which attention loses half its speed against long ones (FlashAttention-2 on Hopper, see
efficiency.toml); generations whose matrix units outran their exponentials have a head dim of their own there"""
SLOWEST = 0.3
"""least rate of norms, activations and losses over that of copies, on an otherwise idle machine"""
TORCH_CALL_S = 4.4e-6
"""default CPU time per torch call without autograd, where it was not measured (peaks of kind "calls"): decode steps of
1 to 8 rows differed by 3.2 to 5.2 µs per call (two x86 cores)"""
AUTOGRAD_CALL = 5.4 / 4.4
"""time of a torch call in training over one without autograd: training steps with the same tokens in 1 to 16
micro-batches differed by 4.9 to 6.7 µs per operator on the same machine"""
DEFAULT_LAUNCH_S = 1.67e-6
"""launch latency of the machine of TORCH_CALL_S (benchmarks/ceilings_cpu.md); other hosts are scaled by theirs"""
ATTENTION: Mapping[str, tuple[str, ...]] = {"bf16": ("bf16", "fp16"), "fp32": ("fp32",)}
"""activation dtype -> dtypes whose measurements of attention and eager operators count for it"""
WIDE = np.array([name in ("fp32", "tf32") for name in PRECISIONS])
"""by code of precision: activations have 4 bytes"""
FORMATS: Mapping[str, tuple[str, float]] = {
    "fp32": ("fp32", 4),
    "tf32": ("tf32", 4),
    "bf16": ("bf16", 2),
    "fp16": ("fp16", 2),
    "fp8": ("fp8", 1),
    "mxfp8": ("fp8", 1.03),
    "nvfp4": ("fp4", 0.56),
}
"""precision -> (dtype of the peak, bytes per element with its share of the scales)"""
_STAND_INS = {"fp4": "fp8", "fp8": "bf16", "bf16": "fp16", "fp16": "bf16", "tf32": "fp32", "fp32": "tf32"}


@dataclass(frozen=True, kw_only=True)
class Curves:
    """Rates that one chip reaches."""

    generation: str
    source: str
    """'catalogue', or the device and day of the measurement"""
    peaks: Mapping[str, float]
    """precision -> dense peak, FLOP/s"""
    achieved: Mapping[str, float]
    """precision -> FLOP/s of the largest GEMMs"""
    power_limited: Mapping[str, float]
    """precision -> FLOP/s that a long sequence of GEMMs does not exceed, because of the power limit; where measured
    apart from a burst"""
    gemm_k: float
    """inner dimension at which half the rate is lost, for bf16 (or fp32, where that is faster)"""
    gemm_waves: float
    """waves at which half the rate is lost"""
    num_sms: int
    attention_forward: Mapping[str, float]
    """dtype of ATTENTION -> FLOP/s of fused attention, long sequences, head dim 128"""
    attention_backward: Mapping[str, float]
    attention_at: Mapping[tuple[str, bool], AttentionCurve | None]
    """(dtype, is backward) -> curve over the measured lengths"""
    bytes_per_s: float
    """bytes/s of large copies in device memory"""
    eager_bytes_per_s: Mapping[str, float]
    """dtype of ATTENTION -> bytes/s of eager torch operators, where measured; else that of large copies"""
    row_bytes_per_s: Mapping[str, float]
    """dtype of ATTENTION -> bytes/s at which GEMMs with a single row read their weights, where measured; else that of
    large copies"""
    kernel_s: float
    launch_s: float
    call_s: float = TORCH_CALL_S
    head_dim: float = HEAD_DIM
    """head dim at which attention loses half its speed"""
    grouped: float = 1.0
    """rate of a grouped GEMM of routed rows over a plain one of the same work, where it was measured"""
    gemm_overlap: float | None = None
    """exponent p of the soft roofline (computeᵖ + readsᵖ)^(1/p) of a GEMM with few rows, where it was measured"""

    @property
    def autograd_call_s(self) -> float:
        """CPU time per torch call in training."""
        return self.call_s * AUTOGRAD_CALL

    @property
    def usual_peak(self) -> float:
        """Peak that MFU refers to: dense bf16; fp32 on a CPU that emulates bf16 and is fastest in fp32."""
        return max(self.peaks["bf16"], self.peaks["fp32"])

    def sustained(self, precision: str) -> float:
        """FLOP/s of the largest GEMMs in a long sequence."""
        return min(self.achieved[precision], self.power_limited.get(precision, np.inf))

    def gemm_flops(self, precision: Ints, m: Array, n: Array, k: Array, groups: Array | float = 1.0) -> Array:
        """achieved · k/(k + k½·speed) · w/(w + w½), with w = groups·⌈m·n⌉ tiles over the multiprocessors; at most the
        power-limited rate, which a GEMM with idle units comes nearer to, since the clock rises meanwhile."""
        achieved, power_limited, speed = (rates[precision] for rates in self._rates)
        waves = np.maximum(groups * m * n / (TILE * self.num_sms), 1e-9)
        achieved = achieved * np.where(np.asarray(groups) > 1, self.grouped, 1.0)
        shaped = achieved * k / (k + self.gemm_k * speed) * waves / (waves + self.gemm_waves)
        return np.minimum(shaped, power_limited)

    @cached_property
    def _rates(self) -> tuple[Array, Array, Array]:
        """By code of precision: achieved and power-limited FLOP/s, and the peak over the usual one."""
        usual = self.usual_peak
        return (
            np.array([self.achieved[name] for name in PRECISIONS]),
            np.array([self.power_limited.get(name, np.inf) for name in PRECISIONS]),
            np.array([max(1.0, self.peaks[name] / usual) for name in PRECISIONS]),
        )

    def attention_flops(
        self, keys: Array | float, head_dim: float, *, backward: bool, precision: Ints | None = None
    ) -> Array:
        """achieved · s/(s + s½) · the head dim's factor against 128; interpolated where lengths were measured.
        `precision` has a code per layout; None: 16 bits."""
        keys = np.asarray(keys, dtype=float)
        narrow = self._attention_flops("bf16", keys, head_dim, backward=backward)
        if precision is None:
            return narrow
        return np.where(WIDE[precision], self._attention_flops("fp32", keys, head_dim, backward=backward), narrow)

    def _attention_flops(self, dtype: str, keys: Array, head_dim: float, *, backward: bool) -> Array:
        known = self.attention_at.get((dtype, backward))
        if known is not None:
            return known.flops(keys, head_dim)
        best = (self.attention_backward if backward else self.attention_forward)[dtype]
        dim = head_dim / (head_dim + self.head_dim) * (128 + self.head_dim) / 128
        return best * min(dim, 1.05) * keys / (keys + SEQUENCE)

    def eager_rate(self, precision: Ints) -> Array:
        """Bytes/s of eager torch operators for each layout."""
        return np.where(WIDE[precision], *(self.eager_bytes_per_s[dtype] for dtype in ("fp32", "bf16")))

    def memory_bound_s(self, num_bytes: Array) -> Array:
        """Seconds of a memory-bound kernel: bytes / bandwidth + its fixed overhead."""
        return np.where(num_bytes > 0, num_bytes / self.bytes_per_s + self.kernel_s, 0.0)


def curves(chip: Chip, measured: Peaks | None = None, *, kernel: str = "attention", share: float = 1.0) -> Curves:
    """The curves of a chip; `measured` ceilings of this device replace what they cover. `kernel` names the fused
    attention: the generation's own, or flash_2. `share` is one device's share of what was measured."""
    peaks = _peaks(chip, measured, share)
    if not peaks or not (chip.memory_bytes_per_s or measured):
        raise BadInput(
            f"the speed of {chip.title} is unknown; run armillary bench ceilings on it, or name another chip with --on"
        )
    generation, table = _generation(chip)
    clock = clock_share(chip)
    by_precision = {name: _peak_of(peaks, dtype) for name, (dtype, _) in FORMATS.items()}
    shares: Mapping[str, float] = table["gemm"]
    achieved = {
        name: by_precision[name] * (shares.get(name) or shares.get(dtype) or shares["bf16"]) * clock
        for name, (dtype, _) in FORMATS.items()
    }
    bandwidth = (chip.memory_bytes_per_s or 0.0) * table["memory"]
    catalogue_curves = Curves(
        generation=generation,
        source="catalogue",
        peaks=by_precision,
        achieved=achieved,
        power_limited={},
        gemm_k=table["gemm_k"],
        gemm_waves=table["gemm_waves"],
        num_sms=chip.num_sms or 100,
        attention_forward=dict.fromkeys(ATTENTION, by_precision["bf16"] * table[kernel]["forward"] * clock),
        attention_backward=dict.fromkeys(ATTENTION, by_precision["bf16"] * table[kernel]["backward"] * clock),
        attention_at={},
        bytes_per_s=bandwidth,
        eager_bytes_per_s=dict.fromkeys(ATTENTION, bandwidth),
        row_bytes_per_s=dict.fromkeys(ATTENTION, bandwidth),
        kernel_s=table["kernel_s"],
        launch_s=table["launch_s"],
        head_dim=table.get("head_dim", {}).get(kernel, HEAD_DIM),
        gemm_overlap=table.get("gemm_overlap"),
    )
    return with_measured(catalogue_curves, measured, share) if measured else catalogue_curves


def clock_share(chip: Chip) -> float:
    """Rate of GEMMs and attention under the chip's power limit over that at its full power; 1 without a limit."""
    if chip.power_limit_w is None or not chip.tdp_w:
        return 1.0
    shares, clocks = zip(*_table()["clock_under_power_limit"]["points"], strict=True)
    return float(np.interp(min(chip.power_limit_w / chip.tdp_w, 1.0), shares, clocks))


def with_measured(curves: Curves, measured: Peaks, share: float = 1.0) -> Curves:
    """Ceilings of `armillary bench` in place of the catalogue's: GEMMs in a burst and, where known, sustained;
    attention, copies, launches, torch calls."""
    achieved, power_limited = dict(curves.achieved), dict(curves.power_limited)
    for name, (dtype, _) in FORMATS.items():
        best, sustained = measured.best_gemm(dtype), _sustained(measured, dtype)
        if best:
            achieved[name] = best * share
        if sustained:
            power_limited[name] = sustained * share
    copied = (measured.best_copy() or 0.0) * share or curves.bytes_per_s
    grouped = measured.best("grouped", "flops", dtype="bf16")
    launches = [float(point["seconds"]) for point in measured.points.get("launch", ()) if not point.get("graph")]
    return replace(
        curves,
        source=f"{measured.device}, measured {measured.date}",
        achieved=achieved,
        power_limited=power_limited,
        attention_forward=_attention(curves, measured, share, backward=False),
        attention_backward=_attention(curves, measured, share, backward=True),
        attention_at={
            (dtype, backward): measured_attention(measured, share, dtypes, backward=backward)
            for dtype, dtypes in ATTENTION.items()
            for backward in (False, True)
        },
        bytes_per_s=copied,
        eager_bytes_per_s={dtype: _eager_rate(measured, dtypes, share, copied) for dtype, dtypes in ATTENTION.items()},
        row_bytes_per_s={dtype: _row_rate(measured, dtypes, share, copied) for dtype, dtypes in ATTENTION.items()},
        grouped=min(1.0, grouped * share / achieved["bf16"]) if grouped else curves.grouped,
        launch_s=min(launches, default=curves.launch_s),
        call_s=_call_s(measured, launches),
    )


def _call_s(measured: Peaks, launches: list[float]) -> float:
    """As measured in an engine on this CPU, else the default scaled by the launch latency."""
    timed = next((float(point["seconds"]) for point in measured.points.get("calls", ())), None)
    return TORCH_CALL_S * min(launches, default=DEFAULT_LAUNCH_S) / DEFAULT_LAUNCH_S if timed is None else timed


def _eager_rate(measured: Peaks, dtypes: tuple[str, ...], share: float, copied: float) -> float:
    """Bytes/s of eager operators; a rate below SLOWEST of copies was measured beside other work."""
    rates = [measured.best("passes", "bytes_per_s", dtype=dtype) for dtype in dtypes]
    best = max((rate for rate in rates if rate is not None), default=None)
    return copied if best is None else max(best * share, copied * SLOWEST)


def _row_rate(measured: Peaks, dtypes: tuple[str, ...], share: float, copied: float) -> float:
    """Bytes/s of the best GEMM with one row, which moves little but its weights."""
    rates = [
        float(point["flops"]) / 2 * FORMATS[point["dtype"]][1]
        for point in measured.points.get("gemm", ())
        if point["m"] == 1 and point["dtype"] in dtypes
    ]
    return min(max(rates) * share, copied) if rates else copied


def _attention(curves: Curves, measured: Peaks, share: float, *, backward: bool) -> dict[str, float]:
    """FLOP/s of long sequences with head dim 128 per dtype, from the best measured rate; the catalogue's where there is
    none."""
    before = curves.attention_backward if backward else curves.attention_forward
    best = dict.fromkeys(ATTENTION, 0.0)
    for point in measured.points.get("attention", ()):
        dtype = next((name for name, dtypes in ATTENTION.items() if point["dtype"] in dtypes), None)
        if bool(point["backward"]) == backward and dtype is not None:
            sizes = float(point["keys"]), float(point["head_dim"])
            of_best = float(curves.attention_flops(*sizes, backward=backward)) / before["bf16"]
            best[dtype] = max(best[dtype], float(point["flops"]) * share / of_best)
    return {dtype: rate or before[dtype] for dtype, rate in best.items()}


def _sustained(measured: Peaks, dtype: str) -> float | None:
    """The best rate without pauses, where it was measured beside the burst."""
    rates = [
        point.get("beside", {}).get("sustained_flops") or point.get("sustained_flops")
        for point in measured.points.get("gemm", ())
        if point.get("dtype") == dtype
    ]
    return max((float(rate) for rate in rates if rate), default=None)


def _peaks(chip: Chip, measured: Peaks | None, share: float) -> dict[str, float]:
    """Dense peaks by dtype; where the catalogue has none, the best measured rate."""
    if chip.flops:
        return dict(chip.flops)
    dtypes = {str(point["dtype"]) for point in measured.points.get("gemm", ())} if measured else set()
    return {dtype: best * share for dtype in dtypes if measured and (best := measured.best_gemm(dtype))}


def _peak_of(peaks: Mapping[str, float], dtype: str) -> float:
    """The peak of a dtype, or of the nearest dtype that the chip computes it in."""
    seen: set[str] = set()
    while dtype not in peaks and dtype in _STAND_INS and dtype not in seen:
        seen.add(dtype)
        dtype = _STAND_INS[dtype]
    return peaks.get(dtype) or max(peaks.values())


def width_of(precision: str) -> str:
    """Key of ATTENTION for a precision: fp32 where activations have 4 bytes, else bf16."""
    return "fp32" if precision in ("fp32", "tf32") else "bf16"


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads((Path(__file__).parent / "efficiency.toml").read_text(encoding="utf-8"))


def _generation(chip: Chip) -> tuple[str, dict[str, Any]]:
    sections = ((name, section) for name, section in _table().items() if isinstance(section, dict))
    return next(
        ((name, section) for name, section in sections if chip.name in section.get("chips", ())),
        ("default", _table()["default"]),
    )
