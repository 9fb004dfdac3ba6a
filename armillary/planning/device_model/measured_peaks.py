"""Measured ceilings for a plan: the stored peaks of this device, found by its chip."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from armillary.spec.hardware import Chip, Cluster, Tier
from armillary.store import nan_safe_json
from armillary.store.home import Home

if TYPE_CHECKING:  # the store's locks and sockets are slow to import, and most plans have nothing measured
    from armillary.store.peaks import Peaks, Point


def measured_peaks(home: Home, chip: Chip, device: str = "") -> Peaks | None:
    """Ceilings of `device`, or of any stored device with this chip; None where none was measured."""
    paths = sorted(home.peaks.glob("*.json"))
    names = [device] if device and paths else [name for name in _devices(paths) if _is_chip(name, chip)]
    if not names:
        return None
    from armillary.store.peaks import load_peaks

    return next((peaks for name in names if (peaks := _useful(load_peaks(home, name))) is not None), None)


def with_measured_links(home: Home, cluster: Cluster) -> Cluster:
    """The cluster with its links as `armillary launch --check` measured them last between nodes of this kind."""
    if cluster.num_nodes == 1 or not home.peaks.is_dir():
        return cluster
    from armillary.store.peaks import NETWORK, load_peaks

    peaks = load_peaks(home, NETWORK)
    return (
        replace(cluster, tiers=tuple(_as_measured(tier, peaks, cluster.chip) for tier in cluster.tiers))
        if peaks
        else cluster
    )


def _as_measured(tier: Tier, peaks: Peaks, chip: Chip) -> Tier:
    point = peaks.link(tier.link.name, chip.name)
    if point is None:
        return tier
    circumstances = point.get("beside", {})
    source = f"armillary launch --check of {circumstances.get('date', peaks.date)}"
    rate, latency = float(point["bytes_per_s"]), float(point["alpha_s"])
    link = replace(tier.link, bytes_per_s=rate, latency_s=latency, is_measured=True, source=source)
    return replace(tier, link=link, oversubscription=1.0)


def cpu_peaks(home: Home, chip: Chip, cores: int, processes: int) -> tuple[Peaks | None, float]:
    """(ceilings, the share of one of `processes`): an equal share of what all cores reach together, and as much as a
    rank's threads reached alone. One process has all threads and reaches at least what a single thread does, even if
    the machine was busy when all threads were measured."""
    from armillary.machine.device_name import device_name

    all_cores, share = measured_peaks(home, chip, device_name("cpu")), 1 / max(processes, 1)
    threads = max(1, cores // processes) if processes > 1 else 1
    if all_cores is None or threads == cores:
        return all_cores, share
    from armillary.store.peaks import load_peaks

    own = load_peaks(home, device_name("cpu", threads=threads))
    core_share = min(1.0, cores / max(1, processes * threads))  # more ranks than cores share them
    return (peaks_per_rank(own, all_cores, share, core_share), 1.0) if own is not None else (all_cores, share)


def peaks_per_rank(own: Peaks, all_cores: Peaks, share: float, core_share: float = 1.0) -> Peaks:
    """Ceilings of one of several processes on a CPU: its share of what all cores reach together, and more where its
    threads reached more alone, times the `core_share` they get. Memory bandwidth is shared: copies get a share, and
    eager operators move no more than that."""
    points = {kind: shared_points(all_cores, kind, share) for kind in _RATES}
    alone = {kind: shared_points(own, kind, core_share) for kind in ("gemm", "attention", "passes")}
    most = (all_cores.best_copy() or 0.0) * share
    alone["passes"] = tuple({**point, "bytes_per_s": min(point["bytes_per_s"], most)} for point in alone["passes"])
    joined = {kind: (*shared, *alone.get(kind, ())) for kind, shared in points.items()}
    return replace(all_cores, points={**all_cores.points, **{kind: rows for kind, rows in joined.items() if rows}})


_RATES = ("gemm", "attention", "passes", "copy")
"""kinds of which each process has a share; latencies are not shared"""


def shared_points(peaks: Peaks, kind: str, share: float) -> tuple[Point, ...]:
    """Points of a kind with this share of their rates."""
    rates = ("flops", "bytes_per_s")
    return tuple(
        {name: value * share if name in rates else value for name, value in point.items()}
        for point in peaks.points.get(kind, ())
    )


def _devices(paths: list[Path]) -> list[str]:
    """Names of the stored devices; a CPU, named by its threads, is no chip of the catalogue."""
    names = [nan_safe_json.read_table(path).get("device") for path in paths]
    return [name for name in names if isinstance(name, str) and not name.endswith((" thread", " threads"))]


def _is_chip(name: str, chip: Chip) -> bool:
    from armillary.machine.gpus import Gpu  # looking at machines is slow to import, and seldom needed
    from armillary.machine.machine import chip_of

    return chip_of(Gpu(name=name, vendor="", memory_bytes=None)).name == chip.name


def _useful(peaks: Peaks | None) -> Peaks | None:
    """Peaks with both GEMMs and copies; otherwise the catalogue serves better."""
    return peaks if peaks is not None and peaks.points.get("gemm") and peaks.best_copy() else None
