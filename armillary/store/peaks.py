"""Peaks: the measured ceilings of a device, its links and its disk, in peaks/DEVICE.json.

Lists of points by kind; a point has measured fields, and fields that describe the measured case. Planning and diagnosis
use peaks only for the device on which they were measured.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from armillary.errors import BadData, BadInput
from armillary.store import nan_safe_json
from armillary.store.atomic import write_json
from armillary.store.home import Home
from armillary.store.lock import locked

Point = Mapping[str, Any]
MEASURED = ("flops", "bytes_per_s", "alpha_s", "seconds", "resident_bytes")
"""Measured fields: FLOP/s, bytes/s, latency of a collective, seconds per run, memory in use."""
BESIDE = "beside"
"""A sub-table of a point with circumstances of the result (spread, clocks, date), which do not identify the case."""
NETWORK = "network"
"""device under which links between nodes are stored: they belong to no single one"""
KINDS: dict[str, tuple[str, ...]] = {
    "gemm": ("m", "n", "k", "dtype", "flops"),
    "copy": ("bytes", "bytes_per_s"),
    "read": ("bytes", "bytes_per_s"),
    "write": ("bytes", "bytes_per_s"),
    "triad": ("bytes", "bytes_per_s"),
    "cache": ("op", "bytes", "bytes_per_s"),
    "attention": ("keys", "head_dim", "dtype", "backward", "flops"),
    "passes": ("dtype", "tokens", "bytes_per_s"),
    "fma": ("dtype", "flops"),
    "collective": ("op", "world", "alpha_s", "bytes_per_s"),
    "link": ("link", "alpha_s", "bytes_per_s"),
    "collective_time": ("op", "world", "bytes", "seconds"),
    "launch": ("seconds",),
    "host_copy": ("direction", "bytes", "bytes_per_s"),
    "disk": ("op", "bytes", "bytes_per_s"),
    "loader": ("path", "tokens", "seconds"),
    "process": ("what", "resident_bytes"),
    "calls": ("what", "seconds"),
    "latency": ("level", "seconds", "resident_bytes"),
    "sync": ("what", "threads", "seconds"),
    "blas": ("op", "by", "flops", "bytes_per_s"),
}
"""Fields of every point of a kind; further fields (pinned, path, …) also describe the case, and other kinds are kept
unchecked."""


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """Measured ceilings of one device."""

    device: str  # the driver's name
    date: str  # of the latest measurement
    about: Mapping[str, Any] = field(default_factory=dict)  # driver, clocks and library versions
    points: Mapping[str, tuple[Point, ...]] = field(default_factory=dict)  # kind -> points, see KINDS

    def best(self, kind: str, measure: str, **where: Any) -> float | None:
        """The highest `measure` of the points that match `where`; None where there is none."""
        rows = (point for point in self.points.get(kind, ()) if all(point.get(k) == v for k, v in where.items()))
        return max((float(point[measure]) for point in rows), default=None)

    def best_gemm(self, dtype: str) -> float | None:
        """FLOP/s of the fastest matrix multiplication in `dtype`."""
        return self.best("gemm", "flops", dtype=dtype)

    def is_emulated(self, dtype: str) -> bool:
        """Whether the device has no native support of a dtype."""
        return any(
            point.get(BESIDE, {}).get("emulated") for point in self.points.get("gemm", ()) if point["dtype"] == dtype
        )

    def best_copy(self) -> float | None:
        """bytes/s of the fastest copy in device memory."""
        return self.best("copy", "bytes_per_s")

    def link(self, name: str, chip: str) -> Point | None:
        """A link as it was measured last between nodes with this chip; None where it was not."""
        known = (point for point in reversed(self.points.get("link", ())) if point["link"] == name)
        return next((point for point in known if point.get("chip", chip) == chip), None)

    def with_points(self, kind: str, points: Iterable[Point]) -> Peaks:
        """With these points added; a point replaces an older one of the same case."""
        rows = {_case(point): point for point in self.points.get(kind, ())}
        for point in points:
            _check(kind, point, self.device)
            rows[_case(point)] = dict(point)
        return replace(self, points={**self.points, kind: tuple(rows.values())})

    def merge(self, newer: Peaks) -> Peaks:
        """Both, with the newer points where they overlap."""
        if newer.device != self.device:
            raise BadInput(f"peaks of {newer.device} do not belong to {self.device}; measure each device separately")
        merged = replace(self, date=max(self.date, newer.date), about={**self.about, **newer.about})
        for kind, points in newer.points.items():
            merged = merged.with_points(kind, points)
        return merged

    def better_of(self, other: Peaks) -> Peaks:
        """`other`, with our points for the cases in which ours are faster: the slower measurement was disturbed."""
        points = dict(other.points)
        for kind, newer in points.items():
            own = {_case(point): point for point in self.points.get(kind, ())}
            points[kind] = tuple(_faster(own.get(_case(point)), point) for point in newer)
        return replace(other, points=points)


def _faster(old: Point | None, new: Point) -> Point:
    rate = next((name for name in ("flops", "bytes_per_s") if name in new), None)
    return new if old is None or rate is None or new[rate] >= old[rate] else old


def new_peaks(device: str, about: Mapping[str, Any] | None = None) -> Peaks:
    """Empty peaks of today."""
    return Peaks(device=device, date=time.strftime("%Y-%m-%d"), about=about or {})


def load_peaks(home: Home, device: str) -> Peaks | None:
    """The peaks of this device, or None."""
    path = peaks_path(home, device)
    if not path.is_file():
        return None
    peaks = _from_json(nan_safe_json.read_table(path), path)
    return peaks if peaks.device == device else None


def save_peaks(home: Home, peaks: Peaks) -> Peaks:
    """Merge with the stored peaks of the device."""
    path = peaks_path(home, peaks.device)
    with locked(path.with_name(f".{path.name}.lock")):
        known = load_peaks(home, peaks.device)
        merged = known.merge(peaks) if known else peaks
        write_json(path, {"device": merged.device, "date": merged.date, "about": merged.about, **merged.points})
    return merged


def peaks_path(home: Home, device: str) -> Path:
    """'NVIDIA H200' -> peaks/nvidia-h200.json."""
    return home.device_file(home.peaks, device)


def _from_json(table: Mapping[str, Any], path: Path) -> Peaks:
    lists = {kind: points for kind, points in table.items() if isinstance(points, list)}
    if not isinstance(table.get("device"), str) or not isinstance(table.get("date"), str):
        raise BadData(f"{path} lacks device or date; delete it and measure again with armillary bench")
    peaks = Peaks(device=table["device"], date=table["date"], about=table.get("about", {}))
    for kind, points in lists.items():
        peaks = peaks.with_points(kind, points)
    return peaks


def _check(kind: str, point: Point, device: str) -> None:
    lacking = [name for name in KINDS.get(kind, ()) if name not in point] if isinstance(point, Mapping) else ["fields"]
    if lacking:
        raise BadData(f"a {kind} point of {device} lacks {', '.join(lacking)}; measure again with armillary bench")


def _case(point: Point) -> str:
    return nan_safe_json.dumps({key: point[key] for key in sorted(point) if key not in (*MEASURED, BESIDE)})
