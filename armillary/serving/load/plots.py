"""The drawings of a load report as inline SVG: distributions, the test over time, latency over rate."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from armillary.units import seconds_text

WIDTH, HEIGHT = 960, 300
LEFT, RIGHT, TOP, BOTTOM = 76, 20, 16, 40
COLOURS = ("var(--one)", "var(--two)", "var(--three)", "var(--four)")
_MOST = 600

Line = tuple[str, Sequence[tuple[float, float]]]
"""name, points"""


def line_plot(lines: Sequence[Line], *, label: str, x_name: str, x_text: str = "number", y_text: str = "number",
              limit: float | None = None) -> str:  # fmt: skip
    """Lines over a common pair of axes that begin at 0; `limit` is drawn as a level."""
    lines = [(name, points) for name, points in lines if points]
    if not lines:
        return ""
    right = max(x for _, points in lines for x, _ in points) or 1.0
    top = 1.06 * max([y for _, points in lines for _, y in points] + [limit or 0.0]) or 1.0

    def x(value: float) -> float:
        return LEFT + value / right * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - value / top * (HEIGHT - TOP - BOTTOM)

    parts = [_grid(right, top, x_name, x_text, y_text)]
    for colour, (name, points) in zip(_cycle(len(lines)), lines, strict=True):
        path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in thin(points))
        parts.append(f"<polyline points='{path}' fill='none' stroke='{colour}' stroke-width='1.8'>"
                     f"<title>{escape(name)}</title></polyline>")  # fmt: skip
    if limit is not None:
        parts.append(f"<line class='limit' x1='{LEFT}' x2='{WIDTH - RIGHT}' y1='{y(limit):.1f}' y2='{y(limit):.1f}'/>")
    legend = "".join(f"<span><i style='background:{colour}'></i>{escape(name)}</span>"
                     for colour, (name, _) in zip(_cycle(len(lines)), lines, strict=True))  # fmt: skip
    box = f"viewBox='0 0 {WIDTH} {HEIGHT}' role='img' aria-label='{escape(label)}'"
    return (f"<div class='scroll'><svg {box} style='min-width:560px'>{''.join(parts)}</svg></div>"
            f"<div class='legend'>{legend}</div>")  # fmt: skip


def _cycle(count: int) -> list[str]:
    return [COLOURS[i % len(COLOURS)] for i in range(count)]


def _grid(right: float, top: float, x_name: str, x_text: str, y_text: str) -> str:
    parts = []
    for share in (0, 0.25, 0.5, 0.75, 1):
        at_y = HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)
        at_x = LEFT + share * (WIDTH - LEFT - RIGHT)
        anchor = "end" if share == 1 else "middle" if share else "start"
        parts.append(f"<line class='grid' x1='{LEFT}' x2='{WIDTH - RIGHT}' y1='{at_y:.1f}' y2='{at_y:.1f}'/>"
                     f"<text x='{LEFT - 8}' y='{at_y + 4:.1f}' text-anchor='end'>{_text(share * top, y_text)}</text>"
                     f"<text x='{at_x:.1f}' y='{HEIGHT - BOTTOM + 17}' text-anchor='{anchor}'>"
                     f"{_text(share * right, x_text)}</text>")  # fmt: skip
    middle = (LEFT + WIDTH - RIGHT) / 2
    return "".join(parts) + f"<text x='{middle}' y='{HEIGHT - 6}' text-anchor='middle'>{escape(x_name)}</text>"


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
