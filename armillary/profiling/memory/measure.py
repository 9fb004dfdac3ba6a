"""`bench memory`: latencies with the levels found in them, BLAS under one roofline, threads, storage; as peaks."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from armillary.machine.cores import BackgroundLoad, usable_cores
from armillary.profiling.ceilings import host_copy
from armillary.profiling.ceilings.ceilings import about, name_of
from armillary.profiling.ceilings.settings import settings_for
from armillary.profiling.memory import blas, cpu_latency, gpu_latency, storage
from armillary.profiling.memory.plateaus import Curve, Plateau, plateaus
from armillary.profiling.memory.probes import probes
from armillary.store.peaks import Peaks, new_peaks

Watch = Callable[[int, int, str], None]
SECTIONS = ("latency", "translation", "units", "blas", "storage")
CURVE_S, QUICK_CURVE_S = 40.0, 8.0
CACHES, THROUGH_L1, FROM_L2, TRANSLATION = "caches and memory", "through L1", "from L2 on", "address translation"
_ATOMICS, _HAND_OVERS, _ROUNDS = 20_000, 500, 40
"""of one round, which is short because another process may take a core away; the first quartile of rounds counts"""


@dataclass(frozen=True, kw_only=True)
class MemoryBench:
    """What was measured of one device's memory: points, and the curves with the levels found in them."""

    peaks: Peaks
    curves: dict[str, tuple[Curve, list[Plateau]]] = field(default_factory=dict)
    seconds: float = 0.0
    other_cores: float | None = None


def measure_memory(
    device: torch.device,
    *,
    quick: bool = False,
    folders: tuple[Path, ...] = (Path("."),),
    only: tuple[str, ...] = SECTIONS,
    watch: Watch = lambda done, total, what: None,
    mounts: str | None = None,
) -> MemoryBench:
    """Of a CPU or a GPU; `only` some sections."""
    began, background, settings = time.monotonic(), BackgroundLoad(), settings_for(device, quick=quick)
    bench = MemoryBench(peaks=new_peaks(name_of(device), about(device)))
    on_cuda = device.type == "cuda"
    if "latency" in only:
        bench = (_gpu_latencies if on_cuda else _cpu_latencies)(bench, quick, watch)
    if "translation" in only:
        curve = _gpu_translation(quick, watch) if on_cuda else _cpu_translation(quick, watch)
        page = gpu_latency.PAGE if on_cuda else cpu_latency.PAGE
        bench = _with_levels(bench, TRANSLATION, curve, _tlb_names, page=page)
    if "units" in only:
        bench = _with(bench, "sync", list(gpu_latency.unit_points()) if on_cuda else sync_points(usable_cores()))
    if "blas" in only:
        wide = list(gpu_latency.saxpy_points(quick)) if on_cuda else []
        points = [*wide, *_watched(blas.measure(settings), blas.cases(settings), watch)]
        bench = _with(bench, "blas", points)
    if "storage" in only:
        if on_cuda:
            copies = host_copy.measure(host_copy.cases(settings), settings)
            bench = _with(bench, "host_copy", [point for _, point in copies])
        results = storage.places(folders, _mounts() if mounts is None else mounts)
        bench = _with(bench, "disk", list(storage.measure(settings, results, watch)))
    return replace(bench, seconds=time.monotonic() - began, other_cores=background.cores())


def _watched(points: Any, cases: list[Any], watch: Watch) -> Any:
    for done, point in enumerate(points):
        watch(done + 1, len(cases), f"{point['op']} {point['by']}")
        yield point


def _with(bench: MemoryBench, kind: str, points: list[dict[str, Any]]) -> MemoryBench:
    return replace(bench, peaks=bench.peaks.with_points(kind, points))


def _with_levels(
    bench: MemoryBench, name: str, curve: Curve, names: Callable[[int], list[str]], *, page: int = 0
) -> MemoryBench:
    """The levels of a curve as points, under the names that so many levels have; pages where they are translated."""
    levels = plateaus(curve)
    points = [_level_point(each, level) for each, level in zip(names(len(levels)), levels, strict=True)]
    for point in points if page else []:
        size = point["resident_bytes"]
        point["beside"]["pages"] = None if size is None else round(size / page)
    return replace(_with(bench, "latency", points), curves=bench.curves | {name: (curve, levels)})


def _cpu_latencies(bench: MemoryBench, quick: bool, watch: Watch) -> MemoryBench:
    curve = cpu_latency.cache_curve(quick, QUICK_CURVE_S if quick else CURVE_S, watch)
    return _with_levels(bench, CACHES, curve, _cache_names)


def _gpu_latencies(bench: MemoryBench, quick: bool, watch: Watch) -> MemoryBench:
    curves = gpu_latency.cache_curves(quick, watch)
    bench = _with_levels(bench, THROUGH_L1, curves["ca"], lambda count: ["L1", *_beyond(count - 1)])
    return _with_levels(bench, FROM_L2, curves["cg"], _l2_names)


def _cache_names(count: int) -> list[str]:
    return [*(f"L{i + 1}" for i in range(count - 1)), "memory"]


def _beyond(count: int) -> list[str]:
    return [f"beyond L1, {i + 1}" for i in range(count)]


def _l2_names(count: int) -> list[str]:
    """An L2 of two halves has two levels."""
    return [*["L2", "L2, far", *(f"L2, {i}" for i in range(3, count))][: count - 1], "memory"]


def _tlb_names(count: int) -> list[str]:
    return [*(f"TLB {i + 1}" for i in range(count - 1)), "page tables"]


def _cpu_translation(quick: bool, watch: Watch) -> Curve:
    return list(cpu_latency.over_close(*cpu_latency.translation_curves(quick, watch)))


def _gpu_translation(quick: bool, watch: Watch) -> Curve:
    return gpu_latency.translation_curve(quick, watch)


def _level_point(name: str, level: Plateau) -> dict[str, Any]:
    """`seconds` of a load that the level serves; how much it holds is measured too, and so no part of the case."""
    return {
        "level": name,
        "seconds": level.seconds,
        "resident_bytes": None if level.bytes is None else round(level.bytes),
        "beside": {"seen_from": level.first, "seen_to": level.last, "date": time.strftime("%Y-%m-%d")},
    }


def sync_points(cores: int) -> list[dict[str, Any]]:
    """Seconds per atomic add, alone and by all cores, of a number's way from core to core, and of a barrier."""
    run, date = probes(), time.strftime("%Y-%m-%d")
    results = [("atomic add", 1, lambda: run.armillary_atomic(1, _ATOMICS))]
    if cores > 1:  # threads that wait for each other on one core wait for the scheduler
        results += [
            ("atomic add", cores, lambda: run.armillary_atomic(cores, _ATOMICS)),
            ("core to core", 2, lambda: run.armillary_hand_over(_HAND_OVERS)),
            ("barrier", cores, lambda: run.armillary_barrier(cores, _HAND_OVERS)),
        ]
    return [
        {"what": what, "threads": threads, "seconds": _first_quartile(once), "beside": {"date": date}}
        for what, threads, once in results
    ]


def _first_quartile(once: Callable[[], float]) -> float:
    return sorted(once() for _ in range(_ROUNDS))[_ROUNDS // 4]


def _mounts() -> str:
    path = Path("/proc/mounts")
    return path.read_text() if path.is_file() else ""
