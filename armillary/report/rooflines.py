"""Rooflines of several devices in one chart: attainable FLOP/s over arithmetic intensity, on logarithmic axes."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

from armillary.report.charts import SCATTER_FRAMES, SERIES_COLOURS, Axes, Frame, Text, drawing, legend, number_text

X_TICKS = (1.0, 10.0, 100.0, 1000.0, 10_000.0)
DASHES = ("", "7 4", "2 3")
"""after so many colours the lines are dashed"""
NAME_WIDTH, NAME_HEIGHT = 110.0, 14.0
"""of the name of an operation, in pixels"""


@dataclass(frozen=True, kw_only=True)
class DevicePeaks:
    """One device: its peak and its memory bandwidth."""

    name: str
    flops_per_s: float
    bytes_per_s: float

    @property
    def ridge(self) -> float:
        """Intensity, in FLOP per byte, from which the peak is attainable."""
        return self.flops_per_s / self.bytes_per_s


@dataclass(frozen=True, kw_only=True)
class Operation:
    """A point under the roofs: how fast an operation of some intensity is."""

    name: str
    intensity: float
    flops_per_s: float


def rooflines(
    devices: Sequence[DevicePeaks],
    *,
    label: str,
    y_text: Text,
    operations: Sequence[Operation] = (),
    x_ticks: Sequence[float] = X_TICKS,
) -> str:
    """min(peak, intensity · bandwidth) of every device, with a legend that has the ridge points, and operations;
    intensities between the first and the last tick."""
    rates = [min(device.bytes_per_s for device in devices) * x_ticks[0], *(each.flops_per_s for each in operations)]
    low = floor(log10(min(rates)))
    high = ceil(log10(max(device.flops_per_s for device in devices)))
    ys = [10.0**power for power in range(low, high + 1)]
    styles = [_style(i) for i in range(len(devices))]

    def draw(frame: Frame) -> str:
        axes = Axes(frame, x_ticks, ys, log=True)
        lines = [
            f"<polyline fill='none' stroke='{colour}' stroke-width='2' stroke-dasharray='{dash}' "
            f"points='{_points(axes, device)}'><title>{escape(device.name)}</title></polyline>"
            for device, (colour, dash) in zip(devices, styles, strict=True)
        ]
        return axes.grid(number_text, y_text, "FLOP per byte") + "".join(lines) + _operations(axes, operations, y_text)

    names = [f"{device.name}: full speed from {device.ridge:,.0f} FLOP per byte" for device in devices]
    return drawing(draw, label, SCATTER_FRAMES) + legend(zip((colour for colour, _ in styles), names, strict=True))


def _operations(axes: Axes, operations: Sequence[Operation], y_text: Text) -> str:
    """Circles with their names; a name that would cover another one is only shown on hovering."""
    parts, labelled = list[str](), list[tuple[float, float]]()
    for each in operations:
        x, y = axes.x(min(max(each.intensity, axes.xs[0]), axes.xs[-1])), axes.y(each.flops_per_s)
        hover = f"{each.name}: {y_text(each.flops_per_s)} at {each.intensity:,.0f} FLOP per byte"
        parts.append(
            f"<circle class='point' cx='{x:.1f}' cy='{y:.1f}' r='6' fill='var(--four)'>"
            f"<title>{escape(hover)}</title></circle>"
        )
        if all(abs(y - other_y) > NAME_HEIGHT or abs(x - other_x) > NAME_WIDTH for other_x, other_y in labelled):
            labelled.append((x, y))
            side, anchor = (x - 10, "end") if x > axes.frame.end - NAME_WIDTH else (x + 10, "start")
            parts.append(f"<text x='{side:.1f}' y='{y + 18:.1f}' text-anchor='{anchor}'>{escape(each.name)}</text>")
    return "".join(parts)


def _style(i: int) -> tuple[str, str]:
    return SERIES_COLOURS[i % len(SERIES_COLOURS)], DASHES[i // len(SERIES_COLOURS) % len(DASHES)]


def _points(axes: Axes, device: DevicePeaks) -> str:
    first, last = axes.xs[0], axes.xs[-1]
    corners = [first, min(max(device.ridge, first), last), last]
    return " ".join(f"{axes.x(x):.1f},{axes.y(min(device.flops_per_s, x * device.bytes_per_s)):.1f}" for x in corners)
