"""The drawings of a load report as inline SVG: distributions, the test over time, latency over rate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from math import ceil, floor, log10

from armillary.units import seconds_text

WIDTH, HEIGHT = 960, 300
LEFT, RIGHT, TOP, BOTTOM = 76, 28, 16, 40
COLOURS = ("var(--one)", "var(--two)", "var(--three)", "var(--four)")
_MOST = 600

Line = tuple[str, Sequence[tuple[float, float]]]
"""name, points"""


def line_plot(
    lines: Sequence[Line], *, label: str, x_name: str, x_text: str = "number", y_text: str = "number"
) -> str:
    """Lines over a common pair of axes that begin at 0."""
    lines = [(name, points) for name, points in lines if points]
    if not lines:
        return ""
    every = [point for _, points in lines for point in points]
    xs = _ticks([x for x, _ in every])
    ys = [0.0, 0.25, 0.5, 0.75, 1.0] if y_text == "share" else _ticks([y for _, y in every])
    right, top = xs[-1], ys[-1]

    def x(value: float) -> float:
        return LEFT + value / right * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - value / top * (HEIGHT - TOP - BOTTOM)

    parts = [_across(ys, y, y_text), _down(xs, x, x_text, x_name)]
    for colour, (name, points) in zip(_cycle(len(lines)), lines, strict=True):
        path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in thin(points))
        parts.append(f"<polyline points='{path}' fill='none' stroke='{colour}' stroke-width='1.8'>"
                     f"<title>{escape(name)}</title></polyline>")  # fmt: skip
    legend = "".join(f"<span><i style='background:{colour}'></i>{escape(name)}</span>"
                     for colour, (name, _) in zip(_cycle(len(lines)), lines, strict=True))  # fmt: skip
    box = f"viewBox='0 0 {WIDTH} {HEIGHT}' role='img' aria-label='{escape(label)}'"
    return (f"<div class='scroll'><svg {box} style='min-width:560px'>{''.join(parts)}</svg></div>"
            f"<div class='legend'>{legend}</div>")  # fmt: skip


def _cycle(count: int) -> list[str]:
    return [COLOURS[i % len(COLOURS)] for i in range(count)]


def _ticks(values: Sequence[float]) -> list[float]:
    """From 0 to beyond the largest value, in three to six steps of 1, 2, 2.5 or 5 times a power of ten."""
    most = max(max(values), 1e-9)
    power = 10.0 ** floor(log10(most))
    step = next(share * power for share in (0.2, 0.25, 0.5, 1.0, 2.0) if share * power * 6 >= most)
    return [step * i for i in range(ceil(most / step - 1e-9) + 1)]


def _across(ticks: Sequence[float], y: Callable[[float], float], kind: str) -> str:
    return "".join(
        f"<line class='grid' x1='{LEFT}' x2='{WIDTH - RIGHT}' y1='{y(tick):.1f}' y2='{y(tick):.1f}'/>"
        f"<text x='{LEFT - 8}' y='{y(tick) + 4:.1f}' text-anchor='end'>{_text(tick, kind)}</text>"
        for tick in ticks
    )


def _down(ticks: Sequence[float], x: Callable[[float], float], kind: str, name: str) -> str:
    texts = "".join(
        f"<text x='{x(tick):.1f}' y='{HEIGHT - BOTTOM + 17}' text-anchor='middle'>{_text(tick, kind)}</text>"
        for tick in ticks
    )
    middle = (LEFT + WIDTH - RIGHT) / 2
    return texts + f"<text x='{middle}' y='{HEIGHT - 6}' text-anchor='middle'>{escape(name)}</text>"


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
