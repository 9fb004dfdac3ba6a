"""Bars as inline SVG: a few figures of several kinds under each other, their values written at their ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from armillary.report.page import Frame, drawing, legend

WIDE, NARROW = 960, 420
THICK, GAP, BETWEEN, LETTERS = 15, 3, 12, 18
"""heights: of a bar, after it, after a group, of a name above its bars"""
LETTER, VALUE = 7.4, 92
"""width of a letter, about, and of what is written at a bar's end"""
BESIDE = 0.25
"""share of the width up to which names stand beside their bars; longer ones stand above"""
COLOURS = ("var(--one)", "var(--two)", "var(--three)", "var(--four)")

Row = tuple[str, Sequence[float | None]]
"""name, a value of each series"""


def bar_plot(rows: Sequence[Row], series: Sequence[str], *, label: str, text: Callable[[float], str]) -> str:
    """Each row a group of bars, one a series, all from 0 on one scale; a value that is not there leaves no bar."""
    most = max((value for _, values in rows for value in values if value is not None), default=0.0)
    if not most:
        return ""
    room = 10 + LETTER * max(len(name) for name, _ in rows)
    frames = _frame(rows, WIDE, room), _frame(rows, NARROW, room)
    plot = drawing(lambda frame: _bars(rows, series, frame, most, text), label, frames)
    return plot + (legend(zip(COLOURS, series, strict=False)) if len(series) > 1 else "")


def _frame(rows: Sequence[Row], width: int, room: float) -> Frame:
    """As high as its bars; names beside them where they fit."""
    beside = room <= BESIDE * width
    bars = sum(value is not None for _, values in rows for value in values)
    height = 8 + bars * (THICK + GAP) + len(rows) * (BETWEEN + (0 if beside else LETTERS))
    return Frame(width=width, height=height, left=round(room) if beside else 0, right=VALUE, top=4, bottom=4)


def _bars(rows: Sequence[Row], series: Sequence[str], frame: Frame, most: float, text: Callable[[float], str]) -> str:
    parts, y = list[str](), float(frame.top)
    for name, values in rows:
        there = [(place, value) for place, value in enumerate(values) if value is not None]
        if frame.left:
            middle = y + len(there) * (THICK + GAP) / 2 + 3
            parts.append(f"<text x='{frame.left - 10}' y='{middle:.1f}' text-anchor='end'>{escape(name)}</text>")
        else:
            y += LETTERS
            parts.append(f"<text x='0' y='{y - 5:.1f}'>{escape(name)}</text>")
        for place, value in there:
            width = max(1.0, value / most * frame.across)
            parts.append(_bar(frame.left, y, width, COLOURS[place % len(COLOURS)], series[place], text(value)))
            y += THICK + GAP
        y += BETWEEN
    return "".join(parts)


def _bar(x: float, y: float, width: float, colour: str, name: str, value: str) -> str:
    return (
        f"<rect x='{x}' y='{y:.1f}' width='{width:.1f}' height='{THICK}' rx='3' fill='{colour}'>"
        f"<title>{escape(name)} {escape(value)}</title></rect>"
        f"<text x='{x + width + 8:.1f}' y='{y + THICK - 3:.1f}'>{escape(value)}</text>"
    )
