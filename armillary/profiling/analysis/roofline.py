"""The roofline: the least time a device could take for some work, from ceilings measured on it.

Time is at least FLOPs / peak and at least bytes / bandwidth (Williams, Waterman & Patterson, CACM 2009). Ceilings come
from `armillary bench` where this device was measured, else from the catalogue; `source` says which.
"""

from armillary.machine.gpus import Gpu
from armillary.machine.machine import chip_of
from armillary.profiling.profile import Bound, Roofline
from armillary.spec import catalogue
from armillary.spec.hardware import Chip
from armillary.store.home import Home
from armillary.store.peaks import Peaks, load_peaks

LAUNCH_S = 5e-6
"""a launch or a dispatch, where it was not measured: eager torch takes 3 to 6 µs"""
_LITTLE, _SHORT_S = 0.2, 1e-3
"""a call whose roofline time is less than this share of a launch is overhead, unless it takes over a millisecond"""
_STAND_INS = {"tf32": "fp32", "fp16": "bf16", "bf16": "fp16", "fp8": "bf16", "int8": "bf16", "fp64": "fp32"}
"""dtype -> the dtype whose peak stands in where its own is not known"""


def roofline_for(device: str, home: Home | None, memory_bytes: float | None = None) -> Roofline:
    """The roofline of a device by the name its driver gives it: measured, else catalogue, else unknown."""
    peaks = load_peaks(home, device) if home and device else None
    if peaks is not None and (peaks.best_copy() or peaks.points.get("gemm")):
        return _measured(peaks)
    chip = _in_catalogue(device, memory_bytes)
    if chip is not None and chip.flops:
        return Roofline(device=device, flops=dict(chip.flops), bytes_per_s=chip.memory_bytes_per_s, source="catalogue")
    return Roofline(device=device or "unknown")


def _measured(peaks: Peaks) -> Roofline:
    dtypes = {str(point["dtype"]) for point in peaks.points.get("gemm", ())}
    flops = {dtype: best for dtype in sorted(dtypes) if (best := peaks.best_gemm(dtype))}
    bandwidths = [peaks.best_copy(), *(peaks.best(kind, "bytes_per_s") for kind in ("read", "triad"))]
    launches = [float(point["seconds"]) for point in peaks.points.get("launch", ()) if not point.get("graph")]
    return Roofline(
        device=peaks.device,
        flops=flops,
        bytes_per_s=max((b for b in bandwidths if b), default=None),
        launch_s=min(launches, default=None),
        source="measured",
    )


def _in_catalogue(device: str, memory_bytes: float | None) -> Chip | None:
    """By the driver's name; boards of the big clouds carry codes (A100-PG509-200), so the model alone is tried too."""
    words = device.replace("_", "-").split()
    known = chip_of(Gpu(name=device, vendor="", memory_bytes=memory_bytes))
    if known.flops:
        return known
    models = [part for word in words for part in (word, word.split("-")[0])]
    chips = (catalogue.find_chip(model.lower()) for model in models)
    return next((chip for chip in chips if chip is not None and chip.kind != "cpu"), None)


def peak_flops(roofline: Roofline, dtype: str, *, matrix: bool = True) -> float | None:
    """FLOP/s for `dtype`; work outside the matrix units is compared with the fp32 peak."""
    if not matrix:
        return roofline.flops.get("fp32") or roofline.flops.get("bf16")
    if dtype == "fp32" and "tf32" in roofline.flops:  # whether tf32 was allowed is not in the trace: the higher ceiling
        return max(roofline.flops["tf32"], roofline.flops.get("fp32", 0.0))
    seen: set[str] = set()
    while dtype not in roofline.flops and dtype in _STAND_INS and dtype not in seen:
        seen.add(dtype)
        dtype = _STAND_INS[dtype]
    return roofline.flops.get(dtype)


def bound(flops_s: float | None, bytes_s: float | None, seconds: float, calls: int, launch_s: float) -> Bound:
    """The side of the roofline that limits the work; overhead where the launch far outweighs the roofline time."""
    known = [time for time in (flops_s, bytes_s) if time is not None]
    if not known:
        return "unknown"
    if max(known) < calls * launch_s * _LITTLE and seconds < calls * _SHORT_S:
        return "overhead"
    return "compute" if (flops_s or 0.0) >= (bytes_s or 0.0) else "memory"
