"""Efficiency curves: how fast a chip really runs a product of some size, attention, and passes over memory.

One number a machine would hide what matters: a short summed dim, a half-filled last wave and a small array each cost.
The curves of a generation are in efficiency.toml; where this very device was measured, its ceilings replace them.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from armillary.errors import BadInput
from armillary.planning.device_model.attention_curve import AttentionCurve, measured_attention
from armillary.planning.device_model.layout_arrays import PRECISIONS, Array, Ints
from armillary.spec.hardware import Chip

if TYPE_CHECKING:  # the store's locks and sockets are slow to import
    from armillary.store.peaks import Peaks

TILE = 128 * 256
"""outputs of one thread block of a large product (cuBLAS and CUTLASS on Ampere and later)"""
HEAD_DIM, SEQUENCE = 24, 300
"""head dim and keys at which attention loses half its speed, against long ones (FlashAttention-2, figures 4 to 6)"""
SLOWEST = 0.3
"""of the rate of copies, the least that norms, activations and losses come to on a machine with nothing else to do"""
CALL_S = 5.4e-6
"""what a call of torch costs a processor whatever its work: Python, autograd and dispatch. Training steps of the same
tokens in 1 to 16 micro-batches differed by 4.9 to 6.7 µs for each operator more, as quick as the cores just were"""
DECODE_CALL_S = 4.4e-6
"""the same where nothing is kept for a backward pass: decode steps of 1 to 8 rows differed by 3.2 to 5.2 µs a call"""
CALL_LAUNCH_S = 1.67e-6
"""an eager launch on the machine where these two were found (benchmarks/ceilings_cpu.md); other hosts in proportion"""
ATTENTION: Mapping[str, tuple[str, ...]] = {"bf16": ("bf16", "fp16"), "fp32": ("fp32",)}
"""width of activations, by a dtype's name -> dtypes whose measurements of attention and plain operators count for it"""
WIDE = np.array([name in ("fp32", "tf32") for name in PRECISIONS])
"""by code of precision: activations are 4 bytes"""
FORMATS: Mapping[str, tuple[str, float]] = {
    "fp32": ("fp32", 4),
    "tf32": ("tf32", 4),
    "bf16": ("bf16", 2),
    "fp16": ("fp16", 2),
    "fp8": ("fp8", 1),
    "mxfp8": ("fp8", 1.03),
    "nvfp4": ("fp4", 0.56),
}
"""precision -> (dtype whose peak counts, bytes an element with its share of the scales)"""
_STAND_INS = {"fp4": "fp8", "fp8": "bf16", "bf16": "fp16", "fp16": "bf16", "tf32": "fp32", "fp32": "tf32"}


@dataclass(frozen=True, kw_only=True)
class Curves:
    """What one chip reaches."""

    generation: str
    """section of efficiency.toml"""
    source: str
    """'catalogue', or the device and day of the measurement"""
    peaks: Mapping[str, float]
    """precision -> dense peak, FLOP/s"""
    reached: Mapping[str, float]
    """precision -> FLOP/s of the largest products"""
    power_limited: Mapping[str, float]
    """precision -> FLOP/s that no row of products exceeds, because the power limit holds the clock down; where it was
    measured apart from what a burst reaches"""
    gemm_k: float
    """summed dim at which half is lost, for bf16 (or fp32, where that is quicker)"""
    gemm_waves: float
    """waves at which half is lost"""
    num_sms: int
    """multiprocessors"""
    attention_forward: Mapping[str, float]
    """dtype of ATTENTION -> FLOP/s of fused attention, long sequences, head dim 128"""
    attention_backward: Mapping[str, float]
    """the same of its backward"""
    attention_at: Mapping[tuple[str, bool], AttentionCurve | None]
    """(dtype, backward or not) -> what was measured at several lengths"""
    bytes_per_s: float
    """of long passes over device memory"""
    eager_bytes_per_s: Mapping[str, float]
    """dtype of ATTENTION -> rate of torch's operators one by one, where measured; else as of long passes"""
    row_bytes_per_s: Mapping[str, float]
    """dtype of ATTENTION -> rate at which GEMMs of a single row read their weights, where measured; else as of long
    passes"""
    kernel_s: float
    """cost of a kernel beside its work"""
    launch_s: float
    """cost of an eager launch on the host"""
    host: float = 1.0
    """time of a call of torch on this host, over that of the one where CALL_S was found"""

    @property
    def call_s(self) -> float:
        """What a call of torch costs a CPU in training, whatever its work."""
        return CALL_S * self.host

    @property
    def decode_call_s(self) -> float:
        """The same where nothing is kept for a backward pass."""
        return DECODE_CALL_S * self.host

    @property
    def usual_peak(self) -> float:
        """What MFU is of: the dense bf16 peak; fp32's on a CPU that emulates bf16 and is quickest in fp32."""
        return max(self.peaks["bf16"], self.peaks["fp32"])

    def sustained(self, precision: str) -> float:
        """FLOP/s of the largest products in a long row."""
        return min(self.reached[precision], self.power_limited.get(precision, np.inf))

    def gemm_flops(self, precision: Ints, m: Array, n: Array, k: Array, groups: Array | float = 1.0) -> Array:
        """reached · k/(k + k½·speed) · w/(w + w½): w = groups·⌈m·n⌉ tiles over the multiprocessors. Held to the power
        limit's rate, which a product that leaves units idle comes nearer to, as the clock rises meanwhile."""
        reached = np.array([self.reached[name] for name in PRECISIONS])[precision]
        power_limited = np.array([self.power_limited.get(name, np.inf) for name in PRECISIONS])[precision]
        speed = np.array([max(1.0, self.peaks[name] / self.usual_peak) for name in PRECISIONS])[precision]
        waves = np.maximum(groups * m * n / (TILE * self.num_sms), 1e-9)
        shaped = reached * k / (k + self.gemm_k * speed) * waves / (waves + self.gemm_waves)
        flops: Array = np.minimum(shaped, power_limited)
        return flops

    def attention_flops(
        self, keys: Array | float, head_dim: float, *, backward: bool, precision: Ints | None = None
    ) -> Array:
        """reached · s/(s + s½) · the head dim's share against 128; between lengths that were measured, by these.
        `precision` is a code a layout; none: 16 bits."""
        keys = np.asarray(keys, dtype=float)
        half = self._attention_flops("bf16", keys, head_dim, backward=backward)
        if precision is None:
            return half
        wide = self._attention_flops("fp32", keys, head_dim, backward=backward)
        flops: Array = np.where(WIDE[precision], wide, half)
        return flops

    def _attention_flops(self, dtype: str, keys: Array, head_dim: float, *, backward: bool) -> Array:
        known = self.attention_at.get((dtype, backward))
        if known is not None:
            return known.flops(keys, head_dim)
        best = (self.attention_backward if backward else self.attention_forward)[dtype]
        dim = head_dim / (head_dim + HEAD_DIM) * (128 + HEAD_DIM) / 128
        flops: Array = best * min(dim, 1.05) * keys / (keys + SEQUENCE)
        return flops

    def eager_rate(self, precision: Ints) -> Array:
        """bytes/s of torch's operators one by one, for each layout."""
        rates: Array = np.where(WIDE[precision], *(self.eager_bytes_per_s[dtype] for dtype in ("fp32", "bf16")))
        return rates

    def memory_bound_s(self, num_bytes: Array) -> Array:
        """Seconds of one pass over memory: bytes / bandwidth + what a kernel costs."""
        seconds: Array = np.where(num_bytes > 0, num_bytes / self.bytes_per_s + self.kernel_s, 0.0)
        return seconds


def curves(chip: Chip, measured: Peaks | None = None, *, kernel: str = "attention", share: float = 1.0) -> Curves:
    """The curves of a chip; `measured` ceilings of this very device replace what they cover. `kernel` names the fused
    attention: the generation's own, or flash_2. `share` is what one device has of what was measured."""
    peaks = _peaks(chip, measured, share)
    if not peaks or not (chip.memory_bytes_per_s or measured):
        raise BadInput(
            f"nothing is known of the speed of {chip.title}; run armillary bench ceilings on it, "
            "or name another chip with --on"
        )
    generation, table = _generation(chip)
    by_precision = {name: _peak_of(peaks, dtype) for name, (dtype, _) in FORMATS.items()}
    shares: Mapping[str, float] = table["gemm"]
    reached = {name: by_precision[name] * _share(shares, name, dtype) for name, (dtype, _) in FORMATS.items()}
    found = Curves(
        generation=generation,
        source="catalogue",
        peaks=by_precision,
        reached=reached,
        power_limited={},
        gemm_k=table["gemm_k"],
        gemm_waves=table["gemm_waves"],
        num_sms=chip.num_sms or 100,
        attention_forward=dict.fromkeys(ATTENTION, by_precision["bf16"] * table[kernel]["forward"]),
        attention_backward=dict.fromkeys(ATTENTION, by_precision["bf16"] * table[kernel]["backward"]),
        attention_at={},
        bytes_per_s=(chip.memory_bytes_per_s or 0.0) * table["memory"],
        eager_bytes_per_s=dict.fromkeys(ATTENTION, (chip.memory_bytes_per_s or 0.0) * table["memory"]),
        row_bytes_per_s=dict.fromkeys(ATTENTION, (chip.memory_bytes_per_s or 0.0) * table["memory"]),
        kernel_s=table["kernel_s"],
        launch_s=table["launch_s"],
    )
    return with_measured(found, measured, share) if measured else found


def with_measured(curves: Curves, measured: Peaks, share: float = 1.0) -> Curves:
    """Ceilings of `armillary bench` in place of the catalogue's: products in a burst and, where known, in a long row,
    attention, copies, launches."""
    reached, power_limited = dict(curves.reached), dict(curves.power_limited)
    for name, (dtype, _) in FORMATS.items():
        best, sustained = measured.best_gemm(dtype), _sustained(measured, dtype)
        if best:
            reached[name] = best * share
        if sustained:
            power_limited[name] = sustained * share
    copied = (measured.best_copy() or 0.0) * share or curves.bytes_per_s
    launches = [float(point["seconds"]) for point in measured.points.get("launch", ()) if not point.get("graph")]
    return replace(
        curves,
        source=f"{measured.device}, measured {measured.date}",
        reached=reached,
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
        launch_s=min(launches, default=curves.launch_s),
        host=_host(measured, launches),
    )


def _host(measured: Peaks, launches: list[float]) -> float:
    """Calls of torch against those of the machine where CALL_S was found: as the engine's were timed here, else by what
    a single launch takes."""
    timed = next((float(point["seconds"]) for point in measured.points.get("calls", ())), None)
    return min(launches, default=CALL_LAUNCH_S) / CALL_LAUNCH_S if timed is None else timed / DECODE_CALL_S


def _eager_rate(measured: Peaks, dtypes: tuple[str, ...], share: float, copied: float) -> float:
    """What plain operators move; less than a part of what copies do was measured beside other work."""
    rates = [measured.best("passes", "bytes_per_s", dtype=dtype) for dtype in dtypes]
    best = max((rate for rate in rates if rate is not None), default=None)
    return copied if best is None else max(best * share, copied * SLOWEST)


def _row_rate(measured: Peaks, dtypes: tuple[str, ...], share: float, copied: float) -> float:
    """What GEMMs of one row read, by the best of them; the weights are all that such a GEMM moves."""
    rates = [
        float(point["flops"]) / 2 * FORMATS[point["dtype"]][1]
        for point in measured.points.get("gemm", ())
        if point["m"] == 1 and point["dtype"] in dtypes
    ]
    return min(max(rates) * share, copied) if rates else copied


def _attention(curves: Curves, measured: Peaks, share: float, *, backward: bool) -> dict[str, float]:
    """What long sequences with heads of 128 would reach in each dtype, from the best that was measured in it; the
    catalogue's where nothing was."""
    before = curves.attention_backward if backward else curves.attention_forward
    found = dict.fromkeys(ATTENTION, 0.0)
    for point in measured.points.get("attention", ()):
        dtype = next((name for name, dtypes in ATTENTION.items() if point["dtype"] in dtypes), None)
        if bool(point["backward"]) == backward and dtype is not None:
            sizes = float(point["keys"]), float(point["head_dim"])
            of_best = float(curves.attention_flops(*sizes, backward=backward)) / before["bf16"]
            found[dtype] = max(found[dtype], float(point["flops"]) * share / of_best)
    return {dtype: rate or before[dtype] for dtype, rate in found.items()}


def _sustained(measured: Peaks, dtype: str) -> float | None:
    """The best rate without rests, where it was kept beside the burst."""
    rates = [
        point.get("beside", {}).get("sustained_flops") or point.get("sustained_flops")
        for point in measured.points.get("gemm", ())
        if point.get("dtype") == dtype
    ]
    return max((float(rate) for rate in rates if rate), default=None)


def _peaks(chip: Chip, measured: Peaks | None, share: float) -> dict[str, float]:
    """Dense peaks by dtype; where the catalogue has none, the best that was measured."""
    if chip.flops:
        return dict(chip.flops)
    dtypes = {str(point["dtype"]) for point in measured.points.get("gemm", ())} if measured else set()
    return {dtype: best * share for dtype in dtypes if measured and (best := measured.best_gemm(dtype))}


def _peak_of(peaks: Mapping[str, float], dtype: str) -> float:
    """The peak of a dtype, or of the nearest format the chip computes it in."""
    seen: set[str] = set()
    while dtype not in peaks and dtype in _STAND_INS and dtype not in seen:
        seen.add(dtype)
        dtype = _STAND_INS[dtype]
    return peaks.get(dtype) or max(peaks.values())


def _share(shares: Mapping[str, float], precision: str, dtype: str) -> float:
    return shares.get(precision) or shares.get(dtype) or shares["bf16"]


def width_of(precision: str) -> str:
    """Key of ATTENTION for a precision: fp32 where activations are 4 bytes, else bf16."""
    return "fp32" if precision in ("fp32", "tf32") else "bf16"


@cache
def _table() -> dict[str, Any]:
    with (Path(__file__).parent / "efficiency.toml").open("rb") as file:
        return tomllib.load(file)


def _generation(chip: Chip) -> tuple[str, dict[str, Any]]:
    sections = ((name, section) for name, section in _table().items() if isinstance(section, dict))
    return next(
        ((name, section) for name, section in sections if chip.name in section["chips"]),
        ("default", _table()["default"]),
    )
