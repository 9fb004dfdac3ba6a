"""Measured ceilings for a plan: those of this very device, found by the chip a stored device name stands for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from armillary.spec.hardware import Chip
from armillary.store import strict_json
from armillary.store.home import Home

if TYPE_CHECKING:  # the store's locks and sockets are slow to import, and most plans have nothing measured
    from armillary.store.peaks import Peaks, Point


def measured_peaks(home: Home, chip: Chip, device: str = "") -> Peaks | None:
    """Ceilings of `device`, or of any stored device that is this chip; None where none was measured."""
    paths = sorted(home.peaks.glob("*.json"))
    names = [device] if device and paths else [name for name in _devices(paths) if _is_chip(name, chip)]
    if not names:
        return None
    from armillary.store.peaks import load_peaks

    return next((found for name in names if (found := _useful(load_peaks(home, name))) is not None), None)


def cpu_peaks(home: Home, chip: Chip, cores: int, processes: int) -> tuple[Peaks | None, float]:
    """(ceilings, what one of `processes` has of them): an equal share of what all cores reach together, and as much as
    a rank's threads were measured to reach alone. One process has all threads, and reaches what a single one does: it
    may not have, where the machine was busy when all of them were measured."""
    from armillary.machine.device_name import device_name

    whole, share = measured_peaks(home, chip, device_name("cpu")), 1 / max(processes, 1)
    threads = max(1, cores // processes) if processes > 1 else 1
    if whole is None or threads == cores:
        return whole, share
    from armillary.store.peaks import load_peaks

    own = load_peaks(home, device_name("cpu", threads=threads))
    turns = min(1.0, cores / max(1, processes * threads))  # more ranks than cores take turns on them
    return (peaks_per_rank(own, whole, share, turns), 1.0) if own is not None else (whole, share)


def peaks_per_rank(own: Peaks, whole: Peaks, share: float, turns: float = 1.0) -> Peaks:
    """What one of several processes on a processor reaches: its share of what all cores reach together, and more where
    its threads did more alone in their `turns` on the cores. But memory is what the others use as well: copies are a
    share, and plain operators move no more than that."""
    points = {kind: shared_points(whole, kind, share) for kind in _RATES}
    alone = {kind: shared_points(own, kind, turns) for kind in ("gemm", "attention", "passes")}
    most = (whole.best_copy() or 0.0) * share
    alone["passes"] = tuple({**point, "bytes_per_s": min(point["bytes_per_s"], most)} for point in alone["passes"])
    joined = {kind: (*found, *alone.get(kind, ())) for kind, found in points.items()}
    return replace(whole, points={**whole.points, **{kind: found for kind, found in joined.items() if found}})


_RATES = ("gemm", "attention", "passes", "copy")
"""kinds that cores have a part of; what starting an operation or an exchange takes is not shared out"""


def shared_points(peaks: Peaks, kind: str, share: float) -> tuple[Point, ...]:
    """Points of a kind with this share of what they reached."""
    rates = ("flops", "bytes_per_s")
    return tuple(
        {name: value * share if name in rates else value for name, value in point.items()}
        for point in peaks.points.get(kind, ())
    )


def _devices(paths: list[Path]) -> list[str]:
    """Names of the stored devices; a processor, named by its threads, is no chip of the catalogue."""
    names = [strict_json.read_table(path).get("device") for path in paths]
    return [name for name in names if isinstance(name, str) and not name.endswith((" thread", " threads"))]


def _is_chip(name: str, chip: Chip) -> bool:
    from armillary.machine.gpus import Gpu  # looking at machines is slow to import, and seldom needed
    from armillary.machine.machine import chip_of

    return chip_of(Gpu(name=name, vendor="", memory_bytes=None)).name == chip.name


def _useful(peaks: Peaks | None) -> Peaks | None:
    """Products and copies both, else the catalogue serves better."""
    return peaks if peaks is not None and peaks.points.get("gemm") and peaks.best_copy() else None
