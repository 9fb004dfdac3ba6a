"""Measured ceilings for a plan: those of this very device, found by the chip a stored device name stands for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from armillary.spec.hardware import Chip
from armillary.store import strict_json
from armillary.store.home import Home

if TYPE_CHECKING:  # the store's locks and sockets are slow to import, and most plans have nothing measured
    from armillary.store.peaks import Peaks


def measured_peaks(home: Home, chip: Chip, device: str = "") -> Peaks | None:
    """Ceilings of `device`, or of any stored device that is this chip; None where none was measured."""
    paths = sorted(home.peaks.glob("*.json"))
    names = [device] if device and paths else [name for name in _devices(paths) if _is_chip(name, chip)]
    if not names:
        return None
    from armillary.store.peaks import load_peaks

    return next((found for name in names if (found := _useful(load_peaks(home, name))) is not None), None)


def _devices(paths: list[Path]) -> list[str]:
    """Names of the stored devices; a processor, named by its threads, is no chip of the catalogue."""
    names = [strict_json.read_table(path).get("device") for path in paths]
    return [name for name in names if isinstance(name, str) and not name.endswith((" thread", " threads"))]


def _is_chip(name: str, chip: Chip) -> bool:
    from armillary.profiling.gpus import Gpu  # looking at machines is slow to import, and seldom needed
    from armillary.profiling.machine import chip_of

    return chip_of(Gpu(name=name, vendor="", memory_bytes=None)).name == chip.name


def _useful(peaks: Peaks | None) -> Peaks | None:
    """Products and copies both, else the catalogue serves better."""
    return peaks if peaks is not None and peaks.points.get("gemm") and peaks.best_copy() else None
