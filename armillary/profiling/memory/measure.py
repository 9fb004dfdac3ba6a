"""`bench memory`: latencies with the levels found in them, BLAS under one roofline, threads, storage; as peaks."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from armillary.errors import BadInput
from armillary.kernels.core.version_trial import first_line
from armillary.machine.cores import BackgroundLoad, usable_cores
from armillary.profiling.ceilings import host_copy
from armillary.profiling.ceilings.ceilings import about, name_of
from armillary.profiling.ceilings.settings import Settings, settings_for
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
    failed: dict[str, str] = field(default_factory=dict)
    """parts that were not measured, or not to their end, and why"""
    seconds: float = 0.0
    other_cores: float | None = None


Part = Callable[[MemoryBench], MemoryBench]
Save = Callable[[MemoryBench], None]


def measure_memory(
    device: torch.device,
    *,
    quick: bool = False,
    folders: tuple[Path, ...] = (Path("."),),
    only: tuple[str, ...] = SECTIONS,
    watch: Watch = lambda done, total, what: None,
    mounts: str | None = None,
    save: Save = lambda bench: None,
) -> MemoryBench:
    """Of a CPU or a GPU; `only` some sections. A part that fails is named in the result and leaves the others; `save`
    is called after each."""
    began, background, settings = time.monotonic(), BackgroundLoad(), settings_for(device, quick=quick)
    bench = MemoryBench(peaks=new_peaks(name_of(device), about(device)))
    places = storage.places(folders, _mounts() if mounts is None else mounts)
    parts = _gpu_parts(settings, quick, watch) if device.type == "cuda" else _cpu_parts(quick, watch)
    parts["blas"].append(_points("BLAS", "blas", lambda: _watched(settings, watch)))
    parts["storage"].append(_points("storage", "disk", lambda: storage.measure(settings, places, watch)))
    for section in only:
        for name, part in parts[section]:
            bench = _guarded(bench, name, part)
            bench = replace(bench, seconds=time.monotonic() - began, other_cores=background.cores())
            save(bench)
    return bench


def _guarded(bench: MemoryBench, name: str, part: Part) -> MemoryBench:
    """On a chip that nobody has seen a kernel may not compile, and a driver may refuse."""
    try:
        return part(bench)
    except BadInput:
        raise  # something that this machine lacks, such as a compiler
    except Exception as error:
        return _failed(bench, name, error)


def _failed(bench: MemoryBench, name: str, error: Exception) -> MemoryBench:
    why = f"{type(error).__name__}: {first_line(error)[:200]}"
    return replace(bench, failed=bench.failed | {name: why})


def _points(name: str, kind: str, make: Callable[[], Iterable[Any]]) -> tuple[str, Part]:
    """A part of points, of which those before a failure are kept."""

    def part(bench: MemoryBench) -> MemoryBench:
        results: list[dict[str, Any]] = []
        try:
            results.extend(iter(make()))
        except BadInput:
            raise
        except Exception as error:
            bench = _failed(bench, name, error)
        return _with(bench, kind, results)

    return name, part


def _cpu_parts(quick: bool, watch: Watch) -> dict[str, list[tuple[str, Part]]]:
    budget_s = QUICK_CURVE_S if quick else CURVE_S
    caches = partial(_leveled, CACHES, lambda: cpu_latency.cache_curve(quick, budget_s, watch), _cache_names)
    pages = partial(
        _leveled, TRANSLATION, lambda: _cpu_translation(quick, watch), _tlb_names, page=cpu_latency.PAGE, rising=True
    )
    return {
        "latency": [(CACHES, caches)],
        "translation": [(TRANSLATION, pages)],
        "units": [_points("units", "sync", lambda: sync_points(usable_cores()))],
        "blas": [],
        "storage": [],
    }


def _gpu_parts(settings: Settings, quick: bool, watch: Watch) -> dict[str, list[tuple[str, Part]]]:
    curves = {
        name: partial(_leveled, name, partial(gpu_latency.cache_curve, cache, quick, watch), names)
        for name, cache, names in ((THROUGH_L1, "ca", _l1_names), (FROM_L2, "cg", _l2_names))
    }
    pages = partial(
        _leveled,
        TRANSLATION,
        lambda: gpu_latency.translation_curve(quick, watch),
        _tlb_names,
        page=gpu_latency.PAGE,
        rising=True,
    )
    cases = host_copy.cases(settings)
    copies = _points(
        "copies between host and device", "host_copy", lambda: (p for _, p in host_copy.measure(cases, settings))
    )
    return {
        "latency": list(curves.items()),
        "translation": [(TRANSLATION, pages)],
        "units": [_points(name, "sync", partial(make, watch)) for name, make in gpu_latency.UNITS.items()],
        "blas": [_points("SAXPY by width", "blas", lambda: gpu_latency.saxpy_points(quick))],
        "storage": [copies],
    }


def _leveled(
    name: str,
    make: Callable[[], Curve],
    names: Callable[[int], list[str]],
    bench: MemoryBench,
    *,
    page: int = 0,
    rising: bool = False,
) -> MemoryBench:
    return _with_levels(bench, name, make(), names, page=page, rising=rising)


def _watched(settings: Settings, watch: Watch) -> Iterator[Any]:
    cases = blas.cases(settings)
    for done, point in enumerate(blas.measure(settings)):
        watch(done + 1, len(cases), f"{point['op']} {point['by']}")
        yield point


def _with(bench: MemoryBench, kind: str, points: list[dict[str, Any]]) -> MemoryBench:
    return replace(bench, peaks=bench.peaks.with_points(kind, points))


def _with_levels(
    bench: MemoryBench,
    name: str,
    curve: Curve,
    names: Callable[[int], list[str]],
    *,
    page: int = 0,
    rising: bool = False,
) -> MemoryBench:
    """The levels of a curve as points, under the names that so many levels have; pages where they are translated."""
    levels = plateaus(curve, rising=rising)
    points = [_level_point(each, level) for each, level in zip(names(len(levels)), levels, strict=True)]
    for point in points if page else []:
        size = point["resident_bytes"]
        point["beside"]["pages"] = None if size is None else round(size / page)
    return replace(_with(bench, "latency", points), curves=bench.curves | {name: (curve, levels)})


def _cache_names(count: int) -> list[str]:
    return [*(f"L{i + 1}" for i in range(count - 1)), "memory"]


def _l1_names(count: int) -> list[str]:
    return ["L1", *(f"beyond L1, {i + 1}" for i in range(count - 1))]


def _l2_names(count: int) -> list[str]:
    """An L2 of two halves has two levels."""
    return [*["L2", "L2, far", *(f"L2, {i}" for i in range(3, count))][: count - 1], "memory"]


def _tlb_names(count: int) -> list[str]:
    return [*(f"TLB {i + 1}" for i in range(count - 1)), "page tables"]


def _cpu_translation(quick: bool, watch: Watch) -> Curve:
    return list(cpu_latency.over_close(*cpu_latency.translation_curves(quick, watch)))


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
