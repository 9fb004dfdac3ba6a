"""Ceilings recorded on a device of a chip, for plans of our own software where the device at hand was not measured."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from armillary.spec.hardware import Chip

if TYPE_CHECKING:  # the store's locks and sockets are slow to import, and most plans have nothing recorded
    from armillary.store.peaks import Peaks

KINDS = ("gemm", "grouped", "attention", "copy", "launch")


def recorded_peaks(chip: Chip) -> Peaks | None:
    """What recorded_peaks.toml has for this chip; under another power limit than the recorded one, nothing."""
    known = _tables().get(chip.name)
    if known is None or (chip.power_limit_w or chip.tdp_w) != chip.tdp_w:
        return None
    from armillary.store.peaks import Peaks

    points = {kind: tuple(known.get(kind, ())) for kind in KINDS}
    return Peaks(device=known["device"], date=known["date"], about={"source": known["source"]}, points=points)


@cache
def _tables() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
