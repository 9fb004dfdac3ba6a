"""Measured latencies beside published ones (published.toml), for the chips of which there are some."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from armillary.store.peaks import Peaks, Point

_CHIPS = {"nvidia-hopper": ("H100", "H200", "H800", "GH200")}
"""table of published.toml -> words in a device's name"""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One level; `measured` and `range_text` in the unit in which it is compared."""

    level: str
    measured: str
    range_text: str
    within: bool
    source: str


def compared(peaks: Peaks) -> list[Compared]:
    """Every measured level that something was published about."""
    table: dict[str, Any] = next(
        (_published()[chip] for chip, words in _CHIPS.items() if any(w in peaks.device for w in words)), {}
    )
    points = [(point["level"], point) for point in peaks.points.get("latency", ())]
    points += [(point["what"], point) for point in peaks.points.get("sync", ())]
    return [_compared(name, point, table[name]) for name, point in points if name in table]


def _compared(name: str, point: Point, facts: Mapping[str, Any]) -> Compared:
    in_cycles = "low_cycles" in facts
    value = point["beside"].get("cycles", 0.0) if in_cycles else point["seconds"]
    low, high = (facts[f"{end}_{'cycles' if in_cycles else 's'}"] for end in ("low", "high"))
    unit, factor = ("cycles", 1.0) if in_cycles else ("ns", 1e9)
    return Compared(
        level=name,
        measured=f"{value * factor:.1f} {unit}",
        range_text=f"{low * factor:.1f} to {high * factor:.1f} {unit}",
        within=low <= value <= high,
        source=facts["source"],
    )


@cache
def _published() -> dict[str, Any]:
    return tomllib.loads((Path(__file__).parent / "published.toml").read_text())
