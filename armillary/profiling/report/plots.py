"""The drawings of a profile as inline SVG: the log-log roofline and the memory timeline."""

from __future__ import annotations

from html import escape
from math import atan2, ceil, degrees, floor, log10, sqrt

from armillary.profiling.profile import MemoryTimeline, Profile, Roofline, Row
from armillary.profiling.report.profile_text import figures
from armillary.report.page import Frame, drawing
from armillary.units import bandwidth_text, bytes_text, flops_per_s_text, scaled, seconds_text

ROOFLINE_FRAMES = (
    Frame(width=960, height=460, left=92, right=20, top=18, bottom=44),
    Frame(width=420, height=340, left=84, right=24, top=18, bottom=44),
)
MEMORY_FRAMES = (
    Frame(width=960, height=220, left=92, right=20, top=18, bottom=34),
    Frame(width=420, height=200, left=72, right=12, top=18, bottom=34),
)
"""for wide and for narrow screens"""
_SMALLEST, _LARGEST, _USUAL = 4.0, 30.0, 960
"""radius of a point, in a drawing as wide as usual"""
_MOST_POINTS = 400
_COLOURS = {
    "gemm": "#2f6fd0",
    "attention": "#7a4fc0",
    "conv": "#1f9d8a",
    "norm": "#d08a1f",
    "elementwise": "#d9572b",
    "softmax": "#c23b6b",
    "embedding": "#5b8c2a",
    "optimizer": "#8a6d3b",
    "copy": "#3a8fb7",
    "collective": "#a0439c",
}


def work_colour(work: str) -> str:
    return _COLOURS.get(work, "#8892a4")


class Axes:
    """Data to pixels, on logarithmic axes of whole decades."""

    def __init__(self, xs: list[float], ys: list[float], frame: Frame) -> None:
        self.x_range, self.y_range, self.frame = _decades(xs), _decades(ys), frame

    def x(self, value: float) -> float:
        low, high = self.x_range
        return self.frame.left + (log10(value) - low) / (high - low) * self.frame.across

    def y(self, value: float) -> float:
        low, high = self.y_range
        return self.frame.floor - (log10(value) - low) / (high - low) * self.frame.up

    def grid(self) -> str:
        frame, below = self.frame, self.frame.floor + 18
        lines = [
            f"<line class='grid' x1='{self.x(10**power):.1f}' x2='{self.x(10**power):.1f}' y1='{frame.top}' "
            f"y2='{frame.floor}'/><text x='{self.x(10**power):.1f}' y='{below}' text-anchor='middle'>"
            f"{_power(power)}</text>"
            for power in range(self.x_range[0], self.x_range[1] + 1)
        ]
        lines += [
            f"<line class='grid' x1='{frame.left}' x2='{frame.end}' y1='{self.y(10**power):.1f}' "
            f"y2='{self.y(10**power):.1f}'/><text x='{frame.left - 8}' y='{self.y(10**power) + 4:.1f}' "
            f"text-anchor='end'>{scaled(10.0**power, 'FLOP/s', digits=1) if power >= 0 else _power(power)}</text>"
            for power in range(self.y_range[0], self.y_range[1] + 1)
        ]
        named = f"<text x='{frame.middle}' y='{frame.height - 6}' text-anchor='middle'>FLOP a byte</text>"
        return "".join(lines) + named


def roofline_plot(profile: Profile) -> str:
    """Points under the rooflines; empty where nothing has both FLOPs and bytes."""
    rows = [row for row in profile.kernels or profile.operators if row.intensity and row.flops_per_s]
    if not rows:
        return ""
    xs = [row.intensity or 1.0 for row in rows]
    ys = [row.flops_per_s or 1.0 for row in rows]
    roofline = profile.roofline
    if roofline.bytes_per_s:
        xs += [peak / roofline.bytes_per_s for peak in roofline.flops.values()]
        ys += [min(xs) * roofline.bytes_per_s]
    longest = max(row.seconds for row in rows)
    rows = sorted(rows, key=lambda row: -row.seconds)[:_MOST_POINTS]

    def draw(frame: Frame) -> str:
        axes = Axes(xs, ys + list(roofline.flops.values()), frame)
        points = "".join(_point(axes, row, longest, profile.steps) for row in rows)
        return axes.grid() + points + _rooflines(axes, roofline)

    return drawing(draw, "Roofline: FLOP/s over FLOPs a byte", ROOFLINE_FRAMES)


def _point(axes: Axes, row: Row, longest: float, steps: int) -> str:
    radius = max(_SMALLEST, _LARGEST * sqrt(row.seconds / longest) * min(1.0, axes.frame.width / _USUAL))
    hover = escape(f"{row.name}\n{figures(row, steps)}")
    return (
        f"<circle class='point' cx='{axes.x(row.intensity or 1.0):.1f}' cy='{axes.y(row.flops_per_s or 1.0):.1f}' "
        f"r='{radius:.1f}' fill='{work_colour(row.work)}'><title>{hover}</title></circle>"
    )


def _rooflines(axes: Axes, roofline: Roofline) -> str:
    """The memory slope up to the highest peak, and a level for each dtype from where it meets the slope."""
    low, high = 10.0 ** axes.x_range[0], 10.0 ** axes.x_range[1]
    parts: list[str] = []
    taken: list[float] = []
    if roofline.bytes_per_s:
        top = max(roofline.flops.values(), default=10.0 ** axes.y_range[1])
        start = max(low, 10.0 ** axes.y_range[0] / roofline.bytes_per_s)
        end = min(high, top / roofline.bytes_per_s)
        corners = " ".join(f"{axes.x(at):.1f},{axes.y(at * roofline.bytes_per_s):.1f}" for at in (start, end))
        parts.append(f"<polyline class='roofline' points='{corners}'/>")
        parts.append(_slope_label(axes, sqrt(start * end), roofline.bytes_per_s))
    for dtype, peak in sorted(roofline.flops.items(), key=lambda item: -item[1]):
        x, y = axes.x(min(high, max(low, peak / roofline.bytes_per_s if roofline.bytes_per_s else low))), axes.y(peak)
        parts.append(
            f"<path class='roofline' d='M{x:.1f},{y:.1f}H{axes.frame.end}'><title>{escape(dtype)}</title></path>"
        )
        if all(abs(y - other) > 13 for other in taken):
            taken.append(y)
            label = escape(f"{dtype} {flops_per_s_text(peak)}")
            parts.append(f"<text x='{axes.frame.end - 4}' y='{y - 5:.1f}' text-anchor='end'>{label}</text>")
    return "".join(parts)


def _slope_label(axes: Axes, at: float, bytes_per_s: float) -> str:
    x, y = axes.x(at), axes.y(at * bytes_per_s)
    rise = axes.y(1.0) - axes.y(10.0)
    angle = degrees(atan2(rise, axes.x(10.0) - axes.x(1.0)))
    place = f"x='{x:.1f}' y='{y - 8:.1f}' transform='rotate({-angle:.1f} {x:.1f} {y:.1f})'"
    return f"<text {place} text-anchor='middle'>memory {bandwidth_text(bytes_per_s)}</text>"


def memory_plot(memory: MemoryTimeline) -> str:
    """Bytes in use over time, with the peak marked."""
    return drawing(lambda frame: _memory(memory, frame), "Memory in use over time", MEMORY_FRAMES)


def _memory(memory: MemoryTimeline, frame: Frame) -> str:
    end, top = max(memory.times_s) or 1.0, max(memory.peak_bytes, 1.0)

    def x(value: float) -> float:
        return frame.left + value / end * frame.across

    def y(value: float) -> float:
        return frame.floor - value / top * frame.up

    points = thinned(memory.times_s, memory.bytes)
    line = "".join(f"H{x(at):.1f}V{y(held):.1f}" for at, held in points)
    first = f"M{x(points[0][0]):.1f},{y(points[0][1]):.1f}"
    ticks = "".join(
        f"<line class='grid' x1='{frame.left}' x2='{frame.end}' y1='{y(part * top):.1f}' y2='{y(part * top):.1f}'/>"
        f"<text x='{frame.left - 8}' y='{y(part * top) + 4:.1f}' text-anchor='end'>{bytes_text(part * top)}</text>"
        for part in (0, 0.5, 1)
    )
    labels = "".join(
        f"<text x='{x(part * end):.1f}' y='{frame.height - 10}' text-anchor='{anchor}'>"
        f"{seconds_text(part * end)}</text>"
        for part, anchor in ((0, "start"), (0.5, "middle"), (1, "end"))
    )
    area = f"<path class='area' d='{first}{line}V{frame.floor}H{x(points[0][0]):.1f}Z'/>"
    area += f"<path class='edge' d='{first}{line}'/>"
    peak = f"<circle cx='{x(memory.peak_s):.1f}' cy='{y(memory.peak_bytes):.1f}' r='4' fill='#d9572b'/>"
    return ticks + labels + area + peak


def thinned(times: tuple[float, ...], values: tuple[float, ...], most: int = 1500) -> list[tuple[float, float]]:
    """At most about `most` points, each the highest of those it stands for, so that no peak is lost."""
    size = max(1, ceil(len(times) / most))
    groups = (range(start, min(start + size, len(times))) for start in range(0, len(times), size))
    return [max(((times[i], values[i]) for i in group), key=lambda point: point[1]) for group in groups]


def _decades(values: list[float]) -> tuple[int, int]:
    low, high = floor(log10(min(values)) - 0.1), ceil(log10(max(values)) + 0.1)
    return low, max(high, low + 1)


def _power(power: int) -> str:
    return f"{10.0**power:g}" if -3 <= power <= 4 else f"1e{power}"
