"""The drawings of a load report as inline SVG: distributions, the test over time, latency over rate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from math import ceil, floor, log10

from armillary.report.page import Frame, drawing, legend
from armillary.units import seconds_text

FRAMES = (Frame(width=960, height=300, left=76, right=28), Frame(width=420, height=250, left=60, right=22))
"""for wide and for narrow screens"""
COLOURS = ("var(--one)", "var(--two)", "var(--three)", "var(--four)")
_MOST = 600

Line = tuple[str, Sequence[tuple[float, float]]]
"""name, points"""


def line_plot(
    lines: Sequence[Line],
    *,
    label: str,
    x_name: str,
    x_text: str = "number",
    y_text: str = "number",
    marks: Sequence[tuple[float, str]] = (),
    above: float = 0.0,
) -> str:
    """Lines over a common pair of axes; the upright one begins at 0, or at a round value below `above`. `marks` are
    places on the other, each with what happened there."""
    lines = [(name, points) for name, points in lines if points]
    if not lines:
        return ""
    every = [point for _, points in lines for point in points]
    xs = _ticks([x for x, _ in every])
    ys = [0.0, 0.25, 0.5, 0.75, 1.0] if y_text == "share" else _ticks([y for _, y in every])
    while above and len(ys) > 2 and ys[1] <= above:
        ys = ys[1:]
    colours = [COLOURS[i % len(COLOURS)] for i in range(len(lines))]

    def draw(frame: Frame) -> str:
        def x(value: float) -> float:
            return frame.left + value / xs[-1] * frame.across

        def y(value: float) -> float:
            return frame.floor - (value - ys[0]) / (ys[-1] - ys[0]) * frame.up

        parts = [_across(frame, ys, y, y_text), _down(frame, xs, x, x_text, x_name)]
        parts += [_mark(frame, x(at), said) for at, said in marks]
        for colour, (name, points) in zip(colours, lines, strict=True):
            path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in thin(points))
            parts.append(
                f"<polyline points='{path}' fill='none' stroke='{colour}' stroke-width='1.8'>"
                f"<title>{escape(name)}</title></polyline>"
            )
        return "".join(parts)

    names = [name for name, _ in lines]
    return drawing(draw, label, FRAMES) + legend(zip(colours, names, strict=True))


def _mark(frame: Frame, x: float, said: str) -> str:
    """A line down the plot, with its words on the side that has more room."""
    side, anchor = (x + 6, "start") if x < frame.middle else (x - 6, "end")
    return (
        f"<line class='mark' x1='{x:.1f}' x2='{x:.1f}' y1='{frame.top}' y2='{frame.floor}'/>"
        f"<text x='{side:.1f}' y='{frame.top + 12}' text-anchor='{anchor}'>{escape(said)}</text>"
    )


def _ticks(values: Sequence[float]) -> list[float]:
    """From 0 to beyond the largest value, in three to six steps of 1, 2, 2.5 or 5 times a power of ten."""
    most = max(max(values), 1e-9)
    power = 10.0 ** floor(log10(most))
    step = next(share * power for share in (0.2, 0.25, 0.5, 1.0, 2.0) if share * power * 6 >= most)
    return [step * i for i in range(ceil(most / step - 1e-9) + 1)]


def _across(frame: Frame, ticks: Sequence[float], y: Callable[[float], float], kind: str) -> str:
    return "".join(
        f"<line class='grid' x1='{frame.left}' x2='{frame.end}' y1='{y(tick):.1f}' y2='{y(tick):.1f}'/>"
        f"<text x='{frame.left - 8}' y='{y(tick) + 4:.1f}' text-anchor='end'>{_text(tick, kind)}</text>"
        for tick in ticks
    )


def _down(frame: Frame, ticks: Sequence[float], x: Callable[[float], float], kind: str, name: str) -> str:
    texts = "".join(
        f"<text x='{x(tick):.1f}' y='{frame.floor + 17}' text-anchor='middle'>{_text(tick, kind)}</text>"
        for tick in ticks
    )
    return texts + f"<text x='{frame.middle}' y='{frame.height - 6}' text-anchor='middle'>{escape(name)}</text>"


def _text(value: float, kind: str) -> str:
    if kind == "seconds":
        return seconds_text(value) if value else "0"
    return f"{value:.0%}" if kind == "share" else f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"


def cumulative(values: Sequence[float]) -> list[tuple[float, float]]:
    """(value, share of all that do not exceed it)."""
    ordered = sorted(values)
    return [(value, (i + 1) / len(ordered)) for i, value in enumerate(ordered)]


def counted(
    moments: Sequence[float], weights: Sequence[float], *, until: float, bins: int = 60
) -> list[tuple[float, float]]:
    """Weights a second, in `bins` equal parts of the time to `until`."""
    size = until / bins or 1.0
    sums = [0.0] * bins
    for moment, weight in zip(moments, weights, strict=True):
        if 0 <= moment < until:
            sums[min(bins - 1, int(moment / size))] += weight
    return [((i + 0.5) * size, total / size) for i, total in enumerate(sums)]


def thin(points: Sequence[tuple[float, float]], most: int = _MOST) -> list[tuple[float, float]]:
    """Every n-th point, and the last."""
    step = max(1, len(points) // most)
    return [*points[::step], points[-1]]
