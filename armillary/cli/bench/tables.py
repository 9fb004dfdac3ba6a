"""Measured peaks as tables: every figure with its spread, and beside the catalogue's peak where the chip is known."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from armillary.cli.output import Output
from armillary.machine.gpus import Gpu
from armillary.machine.machine import chip_of
from armillary.spec.hardware import Chip
from armillary.store.peaks import Peaks, Point
from armillary.units import bandwidth_text, bytes_text, flops_per_s_text, scaled, seconds_text

MEMORY = ("copy", "read", "write", "triad")
_CLOCKS: dict[str, Callable[[float], str]] = {
    "sm_clock_hz": lambda value: f"{value / 1e6:.0f} MHz",
    "memory_clock_hz": lambda value: f"{value / 1e6:.0f} MHz",
    "cpu_clock_hz": lambda value: f"{value / 1e6:.0f} MHz",
    "power_w": lambda value: f"{value:.0f} W",
    "temperature_c": lambda value: f"{value:.0f} °C",
}


def show_peaks(out: Output, peaks: Peaks, kinds: Sequence[str] = ()) -> None:
    """A table for each group of kinds that was measured, or of those in `kinds`."""
    chip = catalogue_chip(peaks)
    out.say(f"{peaks.device} · {peaks.date}" + (f" · catalogue: {chip.title}" if chip else ""))
    for wanted, draw in _TABLES:
        if any(peaks.points.get(kind) and (not kinds or kind in kinds) for kind in wanted):
            out.say()
            draw(out, peaks, chip)
    clocks = clock_texts(peaks)
    if clocks and not kinds:
        out.say("\nseen meanwhile: " + ", ".join(clocks))


def catalogue_chip(peaks: Peaks) -> Chip | None:
    """The catalogue's row of the measured device, where there is one with peaks."""
    chip = chip_of(Gpu(name=peaks.device, vendor=""))
    return chip if chip.flops else None


def shares(peaks: Peaks) -> dict[str, dict[str, float]]:
    """Best of each over the catalogue's peak: {'gemm': {'bf16': 0.78}, 'copy': {'memory': 0.89}}."""
    chip = catalogue_chip(peaks)
    if chip is None:
        return {}
    by_kind: dict[str, dict[str, float]] = {}
    for kind in ("gemm", "fma", *MEMORY):
        for name, best in bests(peaks, kind):
            share = _share(best, chip.memory_bytes_per_s if kind in MEMORY else chip.peak(name))
            if share is not None:
                by_kind.setdefault(kind, {})["memory" if kind in MEMORY else name] = share
    return by_kind


def bests(peaks: Peaks, kind: str) -> list[tuple[str, float]]:
    """(dtype, or the kind itself, and its highest rate)."""
    points = peaks.points.get(kind, ())
    if kind in ("gemm", "fma"):
        names = dict.fromkeys(point["dtype"] for point in points)
        return [(name, max(point["flops"] for point in points if point["dtype"] == name)) for name in names]
    return [(kind, max(point["bytes_per_s"] for point in points))] if points else []


def clock_texts(peaks: Peaks) -> list[str]:
    """'sm clock 1755 MHz to 1980 MHz' over all points."""
    seen = [point.get("beside", {}) for points in peaks.points.values() for point in points]
    texts = []
    for name, text in _CLOCKS.items():
        values = [row[name] for row in seen if name in row]
        if values:
            low, high = text(min(values)), text(max(values))
            texts.append(f"{name.rpartition('_')[0].replace('_', ' ')} {low if low == high else f'{low} to {high}'}")
    return texts


# --- the tables


def _memory(out: Output, peaks: Peaks, chip: Chip | None) -> None:
    sizes = sorted({point["bytes"] for kind in MEMORY for point in peaks.points.get(kind, ())})
    rows = [[bytes_text(size), *(_at(peaks.points.get(kind, ()), bytes=size) for kind in MEMORY)] for size in sizes]
    if chip and chip.memory_bytes_per_s:
        best = [dict(bests(peaks, kind)).get(kind) for kind in MEMORY]
        rows.append(["best of catalogue", *(_percent(_share(rate, chip.memory_bytes_per_s)) for rate in best)])
    out.table("memory, bytes/s read and written together", ["working set", *MEMORY], rows)


def _cache(out: Output, peaks: Peaks, chip: Chip | None) -> None:
    points = peaks.points.get("cache", ())
    sizes = sorted({point["bytes"] for point in points})
    rows = [[bytes_text(size), *(_at(points, bytes=size, op=op) for op in MEMORY)] for size in sizes]
    out.table("caches: the same buffers again and again", ["working set", *MEMORY], rows)


def _gemm(out: Output, peaks: Peaks, chip: Chip | None) -> None:
    points = peaks.points["gemm"]
    dtypes = list(dict.fromkeys(point["dtype"] for point in points))
    shapes = sorted({(p["m"], p["n"], p["k"]) for p in points}, key=lambda s: (len(set(s)) > 1, s[0] * s[1] * s[2]))
    rows = [
        [f"{m:,} × {n:,} × {k:,}", *(_at(points, m=m, n=n, k=k, dtype=dtype) for dtype in dtypes)] for m, n, k in shapes
    ]
    if chip:
        best = dict(bests(peaks, "gemm"))
        rows.append(["best of catalogue", *(_percent(_share(best[name], chip.peak(name))) for name in dtypes)])
    out.table("GEMMs m × n × k, FLOP/s", ["shape", *dtypes], rows)


def _fma(out: Output, peaks: Peaks, chip: Chip | None) -> None:
    rows = [
        [dtype, flops_per_s_text(best), _percent(_share(best, chip.peak(dtype) if chip else None))]
        for dtype, best in bests(peaks, "fma")
    ]
    out.table("plain multiply-adds, without the matrix units", ["dtype", "measured", "of catalogue"], rows)


# --- tables with one row per point


def _attention(p: Point, chip: Chip | None) -> list[object]:
    return [
        f"{p['keys']:,} keys, head dim {p['head_dim']}",
        p["dtype"],
        "backward" if p["backward"] else "forward",
        flops_per_s_text(p["flops"]),
        _percent(_share(p["flops"], chip.peak(p["dtype"]) if chip else None)),
    ]


def _host_copy(p: Point, chip: Chip | None) -> list[object]:
    return [
        {"adamw": "AdamW on the host"}.get(p["direction"], p["direction"].replace("_", " ")),
        "pinned" if p.get("pinned") else "pageable",
        bytes_text(p["bytes"]),
        bandwidth_text(p["bytes_per_s"]),
        _spread(p),
    ]


def _disk(p: Point, chip: Chip | None) -> list[object]:
    return [
        p["op"].replace("_", " "),
        p.get("threads"),
        bytes_text(p.get("block_bytes", 0)),
        bandwidth_text(p["bytes_per_s"]),
        _spread(p),
        p.get("beside", {}).get("page_cache", ""),
        p.get("path", ""),
    ]


def _collective(p: Point, chip: Chip | None) -> list[object]:
    return [
        p["op"].replace("_", " "),
        p["world"],
        p.get("backend", ""),
        seconds_text(p["alpha_s"]),
        bandwidth_text(p["bytes_per_s"]),
        bandwidth_text(p["beside"]["bus_bytes_per_s"]),
        _percent(p["beside"]["error"]),
    ]


def _loader(p: Point, chip: Chip | None) -> list[object]:
    return [
        p["path"],
        p.get("workers"),
        p.get("prefetch") if p.get("workers") else None,
        f"device, {'pinned' if p.get('pinned') else 'pageable'}" if p.get("to_device") else "host",
        f"{scaled(p['beside']['tokens_per_s'])} tok/s",
        seconds_text(p["seconds"]),
    ]


_PER_POINT: dict[str, tuple[str, tuple[str, ...], Callable[[Point, Chip | None], list[object]]]] = {
    "attention": ("causal attention, back to back", ("shape", "dtype", "pass", "measured", "of catalogue"), _attention),
    "passes": (
        "norm, activation and loss as plain operators",
        ("dtype", "moved", "spread"),
        lambda p, chip: [p["dtype"], bandwidth_text(p["bytes_per_s"]), _spread(p)],
    ),
    "launch": (
        "starting an operation",
        ("mode", "time", "spread"),
        lambda p, chip: [p.get("mode", ""), seconds_text(p["seconds"]), _spread(p)],
    ),
    "host_copy": ("host and device", ("direction", "host memory", "size", "bandwidth", "spread"), _host_copy),
    "disk": ("disk", ("operation", "threads", "block", "bandwidth", "spread", "page cache", "on"), _disk),
    "collective": (
        "collectives: time = latency + bytes / bandwidth",
        ("operation", "ranks", "backend", "latency", "algorithm", "bus", "fit off by"),
        _collective,
    ),
    "loader": ("loader", ("path", "workers", "ahead", "to", "speed", "batch"), _loader),
}
"""kind -> title, columns, cells of a point"""


def _per_point(kind: str, out: Output, peaks: Peaks, chip: Chip | None) -> None:
    title, columns, cells = _PER_POINT[kind]
    out.table(title, columns, [cells(point, chip) for point in peaks.points[kind]])


_TABLES: tuple[tuple[tuple[str, ...], Callable[[Output, Peaks, Chip | None], None]], ...] = (
    (MEMORY, _memory),
    (("cache",), _cache),
    (("gemm",), _gemm),
    (("attention",), partial(_per_point, "attention")),
    (("passes",), partial(_per_point, "passes")),
    (("fma",), _fma),
    (("launch",), partial(_per_point, "launch")),
    (("host_copy",), partial(_per_point, "host_copy")),
    (("disk",), partial(_per_point, "disk")),
    (("collective",), partial(_per_point, "collective")),
    (("loader",), partial(_per_point, "loader")),
)


# --- cells


def _at(points: Iterable[Point], **where: Any) -> str | None:
    """'4.17 T ±1%' of the point that tried exactly this."""
    matching = (p for p in points if all(p.get(key) == value for key, value in where.items()))
    return next((f"{scaled(p.get('flops') or p['bytes_per_s'])} ±{_spread(p)}" for p in matching), None)


def _spread(point: Point) -> str:
    """Half the interquartile range over the median."""
    return f"{50 * point.get('beside', {}).get('spread', 0):.1f}%"


def _share(value: float | None, peak: float | None) -> float | None:
    return value / peak if value is not None and peak else None


def _percent(share: float | None) -> str | None:
    return f"{100 * share:.1f}%" if share is not None else None
