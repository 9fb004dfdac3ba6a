"""The memory bench as one HTML page: curves with the levels found in them, BLAS under the roofline, tables."""

from collections.abc import Sequence
from math import ceil, floor, inf, log10

from armillary.profiling.memory.measure import TRANSLATION, MemoryBench
from armillary.profiling.memory.plateaus import Curve, Plateau
from armillary.profiling.memory.published import compared
from armillary.report.bars import series_bars
from armillary.report.charts import LINE_FRAMES, SERIES_COLOURS, Axes, Frame, drawing, mark
from armillary.report.page import document, heading, note, paragraph, section, table
from armillary.report.rooflines import DevicePeaks, Operation, rooflines
from armillary.store.peaks import Peaks, Point
from armillary.units import bandwidth_text, bytes_text, flops_per_s_text, seconds_text

_ABOUT = {
    TRANSLATION: "One line per page, by the bytes that the pages span; on a CPU less what as many lines packed closely "
    "cost: what translation adds to a load."
}


_X = (0.1, 1.0, 10.0, 100.0, 1000.0)
"""FLOPs per byte: SAXPY has a sixth"""


def memory_page(bench: MemoryBench) -> str:
    title = f"Memory of {bench.peaks.device}"
    below = f"{bench.peaks.date}, measured in {seconds_text(bench.seconds)}; sizes are found in the curves"
    parts = [heading(title, below)]
    for name, (curve, levels) in bench.curves.items():
        about = _ABOUT.get(name, "")
        inside = (paragraph(about) if about else "") + _levels(curve, levels)
        parts.append(section(f"Latency of a load: {name}", inside))
    parts += [part for make in (_published, _blas, _units, _tiers) if (part := make(bench.peaks))]
    if bench.failed:
        parts.append(section("Not measured", table(["part", "why"], [list(each) for each in bench.failed.items()])))
    if (bench.other_cores or 0) > 0.1:
        parts.append(note(f"Other work kept {bench.other_cores:.1f} cores busy meanwhile."))
    return document(title, parts)


def latency_text(seconds: float) -> str:
    """'5.2 ns'; longer ones as elsewhere."""
    return f"{1e9 * seconds:.3g} ns" if seconds < 9.995e-7 else seconds_text(seconds)


def _levels(curve: Curve, levels: Sequence[Plateau]) -> str:
    xs, ys = (_decades([point[i] for point in curve]) for i in (0, 1))

    def draw(frame: Frame) -> str:
        axes = Axes(frame, xs, ys, log=True)
        path = " ".join(f"{axes.x(x):.1f},{axes.y(y):.1f}" for x, y in curve)
        line = f"<polyline points='{path}' fill='none' stroke='{SERIES_COLOURS[0]}' stroke-width='1.8'/>"
        results = [
            f"<line x1='{axes.x(level.first):.1f}' x2='{axes.x(level.last):.1f}' y1='{axes.y(level.seconds):.1f}' "
            f"y2='{axes.y(level.seconds):.1f}' stroke='{SERIES_COLOURS[1]}' stroke-width='5' opacity='0.55'/>"
            for level in levels
        ]
        ends = _ends(frame, [(axes.x(level.bytes), bytes_text(level.bytes)) for level in levels if level.bytes])
        return axes.grid(bytes_text, latency_text, "bytes") + "".join(results) + line + ends

    rows = [
        [str(i + 1), latency_text(level.seconds), "–" if level.bytes is None else bytes_text(level.bytes)]
        for i, level in enumerate(levels)
    ]
    return drawing(draw, "latency over working set", LINE_FRAMES) + table(["level", "latency", "holds"], rows)


_BETWEEN_TEXTS = 75.0


def _ends(frame: Frame, places: Sequence[tuple[float, str]]) -> str:
    """A dashed line where each level ends; two that are close have one text, of the first."""
    parts, last = [], -inf
    for x, text in places:
        near = x - last < _BETWEEN_TEXTS
        parts.append(mark(frame, x) if near else mark(frame, x, text))
        last = last if near else x
    return "".join(parts)


def _decades(values: Sequence[float]) -> list[float]:
    return [10.0**power for power in range(floor(log10(min(values))), ceil(log10(max(values))) + 1)]


def _blas(peaks: Peaks) -> str:
    points = peaks.points.get("blas", ())
    if not points:
        return ""
    device = DevicePeaks(
        name="best GEMM, best SAXPY",
        flops_per_s=max((point["flops"] for point in points if point["op"] == "gemm"), default=0.0),
        bytes_per_s=max(
            (point["bytes_per_s"] for point in points if point["op"] == "saxpy" and not _in_cache(point)), default=0.0
        ),
    )
    if not (device.flops_per_s and device.bytes_per_s):
        return ""
    shown = [point for point in points if not _in_cache(point) and "width" not in point]
    operations = [
        Operation(name=_name(point), intensity=point["beside"]["intensity"], flops_per_s=point["flops"])
        for point in shown
    ]
    label = "BLAS levels under one roofline"
    about = paragraph("Operands that fit a cache come from there, so small GEMVs may be above the roof of memory.")
    chart = rooflines([device], label=label, y_text=flops_per_s_text, operations=operations, x_ticks=_X)
    rows = [
        [_name(point), point["by"], flops_per_s_text(point["flops"]), bandwidth_text(point["bytes_per_s"])]
        for point in points
    ]
    return section("BLAS 1, 2 and 3", about + chart + table(["operation", "by", "FLOP/s", "bytes/s"], rows))


def _in_cache(point: Point) -> bool:
    return "bytes" in point and point["bytes"] <= 1 << 20


def _name(point: Point) -> str:
    size = f"{bytes_text(point['bytes'])}" if "bytes" in point else f"{point['n']:,}"
    return f"{point['op']} {size}"


def _units(peaks: Peaks) -> str:
    rows = [
        [point["what"], str(point["threads"]), latency_text(point["seconds"]), _cycles(point)]
        for point in peaks.points.get("sync", ())
    ]
    if not rows:
        return ""
    text = note(_NEEDS_SASS) if any(row[0].startswith("FFMA") for row in rows) else ""
    drawn = "".join(_cycle_bars(peaks, kind) for kind in ("shared memory", "FFMA"))
    heads = ["what", "threads", "each", "cycles"]
    return section("Instructions, atomics and barriers", drawn + table(heads, rows) + text)


def _cycle_bars(peaks: Peaks, kind: str) -> str:
    """Bank conflicts by stride, FFMA by source registers: cycles of each, where they were measured."""
    points = [point for point in peaks.points.get("sync", ()) if point["what"].startswith(kind)]
    bars = [(point["what"].partition(", ")[2], [point["beside"]["cycles"]]) for point in points]
    if not bars:
        return ""
    return paragraph(f"Cycles: {kind}.") + series_bars(bars, ("cycles",), label=f"cycles, {kind}", text="{:.1f}".format)


_NEEDS_SASS = (
    "FFMA with one to three source registers: PTX names virtual registers, so which register bank each is in, and "
    "whether operands are reused, is up to ptxas. Conflicts of banks can be provoked in SASS only."
)


def _cycles(point: Point) -> str:
    cycles = point["beside"].get("cycles")
    return "–" if cycles is None else f"{cycles:.1f}"


def _published(peaks: Peaks) -> str:
    rows = [
        [each.level, each.measured, each.range_text, "yes" if each.within else "no", each.source]
        for each in compared(peaks)
    ]
    heads = ["level", "measured", "published", "within", "source"]
    return section("Beside published values", table(heads, rows)) if rows else ""


def _tiers(peaks: Peaks) -> str:
    rows = tier_rows(peaks)
    return section("Storage tiers", table(["tier", "holds", "latency", "reads", "writes"], rows)) if rows else ""


def tier_rows(peaks: Peaks) -> list[list[str]]:
    """Caches and memory by the latency of a load, then folders by that of reading 4 kiB at random."""
    levels = [point for point in peaks.points.get("latency", ()) if not point["level"].startswith(("TLB", "page"))]
    rows = [
        [
            point["level"],
            "–" if point["resident_bytes"] is None else bytes_text(point["resident_bytes"]),
            latency_text(point["seconds"]),
            "–",
            "–",
        ]
        for point in sorted(levels, key=lambda point: point["seconds"])
    ]
    disks = peaks.points.get("disk", ())
    for path in dict.fromkeys(point["path"] for point in disks):
        own = {point["op"]: point for point in disks if point["path"] == path and point["threads"] == 1}
        kind = next((str(point.get("file_system", "")) for point in own.values()), "")
        waits = own.get("random_read")
        latency = "–" if waits is None else latency_text(waits["block_bytes"] / waits["bytes_per_s"])
        rates = [bandwidth_text(own[op]["bytes_per_s"]) if op in own else "–" for op in ("read", "write")]
        rows.append([f"{path} ({kind})" if kind else path, "–", latency, *rates])
    return rows
