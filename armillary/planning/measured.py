"""Measured ceilings for a plan: those of this very device, found by the chip a stored device name stands for."""

from __future__ import annotations

from armillary.spec.hardware import Chip
from armillary.store import strict_json
from armillary.store.home import Home
from armillary.store.peaks import Peaks, load_peaks


def measured_peaks(home: Home, chip: Chip, device: str = "") -> Peaks | None:
    """Ceilings of `device`, or of any stored device that is this chip; None where none was measured."""
    if device:
        return _useful(load_peaks(home, device))
    if not home.peaks.is_dir():
        return None
    from armillary.profiling.gpus import Gpu  # looking at machines is slow to import, and seldom needed
    from armillary.profiling.machine import chip_of

    for path in sorted(home.peaks.glob("*.json")):
        name = strict_json.read_table(path).get("device")
        if isinstance(name, str) and chip_of(Gpu(name=name, vendor="", memory_bytes=None)).name == chip.name:
            found = _useful(load_peaks(home, name))
            if found is not None:
                return found
    return None


def _useful(peaks: Peaks | None) -> Peaks | None:
    """Products and copies both, else the catalogue serves better."""
    return peaks if peaks is not None and peaks.points.get("gemm") and peaks.best_copy() else None
