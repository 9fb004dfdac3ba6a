"""`bench memory`: latencies with the levels found in them, BLAS under one roofline, threads, storage; as peaks."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from armillary.machine.cores import BackgroundLoad, usable_cores
from armillary.profiling.ceilings.ceilings import about, name_of
from armillary.profiling.ceilings.settings import settings_for
from armillary.profiling.memory import blas, cpu_latency, storage
from armillary.profiling.memory.plateaus import Curve, Plateau, plateaus
from armillary.profiling.memory.probes import probes
from armillary.store.peaks import Peaks, new_peaks

Watch = Callable[[int, int, str], None]
SECTIONS = ("latency", "translation", "threads", "blas", "storage")
CURVE_S, QUICK_CURVE_S = 40.0, 8.0
NAMES = ("L1", "L2", "L3", "L4")
_ATOMICS, _HAND_OVERS, _ROUNDS = 20_000, 500, 40
"""of one round, which is short because another process may take a core away; the first quartile of rounds counts"""


@dataclass(frozen=True, kw_only=True)
class MemoryBench:
    """What was measured of one device's memory."""

    peaks: Peaks
    cache_curve: Curve = ()
    levels: list[Plateau] = field(default_factory=list)
    translation_curve: Curve = ()
    translation_levels: list[Plateau] = field(default_factory=list)
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
    """Of a CPU; `only` some sections."""
    began, background, settings = time.monotonic(), BackgroundLoad(), settings_for(device, quick=quick)
    bench = MemoryBench(peaks=new_peaks(name_of(device), about(device)))
    if "latency" in only:
        bench = _with_latencies(bench, quick, watch)
    if "translation" in only:
        bench = _with_translation(bench, quick, watch)
    if "threads" in only:
        bench = _with(bench, "sync", sync_points(usable_cores()))
    if "blas" in only:
        bench = _with(bench, "blas", list(_watched(blas.measure(settings), blas.cases(settings), watch)))
    if "storage" in only:
        found = storage.places(folders, _mounts() if mounts is None else mounts)
        bench = _with(bench, "disk", list(storage.measure(settings, found, watch)))
    return replace(bench, seconds=time.monotonic() - began, other_cores=background.cores())


def _watched(points: Any, cases: list[Any], watch: Watch) -> Any:
    for done, point in enumerate(points):
        watch(done + 1, len(cases), f"{point['op']} {point['by']}")
        yield point


def _with(bench: MemoryBench, kind: str, points: list[dict[str, Any]]) -> MemoryBench:
    return replace(bench, peaks=bench.peaks.with_points(kind, points))


def _with_latencies(bench: MemoryBench, quick: bool, watch: Watch) -> MemoryBench:
    curve = cpu_latency.cache_curve(quick, QUICK_CURVE_S if quick else CURVE_S, watch)
    levels = plateaus(curve)
    names = [*NAMES[: len(levels) - 1], "memory"]
    points = [_level_point(name, level) for name, level in zip(names, levels, strict=True)]
    return replace(_with(bench, "latency", points), cache_curve=curve, levels=levels)


def _with_translation(bench: MemoryBench, quick: bool, watch: Watch) -> MemoryBench:
    curve = list(cpu_latency.over_close(*cpu_latency.translation_curves(quick, watch)))
    levels = plateaus(curve)
    names = [f"TLB {i + 1}" for i in range(len(levels) - 1)] + ["page tables"]
    points = [
        _level_point(name, level) | {"pages": None if level.bytes is None else round(level.bytes / cpu_latency.PAGE)}
        for name, level in zip(names, levels, strict=True)
    ]
    return replace(_with(bench, "latency", points), translation_curve=curve, translation_levels=levels)


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
    found = [("atomic add", 1, lambda: run.armillary_atomic(1, _ATOMICS))]
    if cores > 1:  # threads that wait for each other on one core wait for the scheduler
        found += [
            ("atomic add", cores, lambda: run.armillary_atomic(cores, _ATOMICS)),
            ("core to core", 2, lambda: run.armillary_hand_over(_HAND_OVERS)),
            ("barrier", cores, lambda: run.armillary_barrier(cores, _HAND_OVERS)),
        ]
    return [
        {"what": what, "threads": threads, "seconds": _first_quartile(once), "beside": {"date": date}}
        for what, threads, once in found
    ]


def _first_quartile(once: Callable[[], float]) -> float:
    return sorted(once() for _ in range(_ROUNDS))[_ROUNDS // 4]


def _mounts() -> str:
    path = Path("/proc/mounts")
    return path.read_text() if path.is_file() else ""
