"""Diagrams of boxes and lines with texts, as inline SVG in the style of the report pages.

A diagram is data, in a plane of its own units, so that other formats can draw the same with their own shapes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

LETTER = 6.4
"""width of about one letter of 12 px"""


@dataclass(frozen=True, kw_only=True)
class Box:
    """A rectangle with a text in its middle, or at its top where it holds others."""

    x: float
    y: float
    width: float
    height: float
    text: str = ""
    fill: str = ""
    """name of a colour of the page: one, two, three, four; empty: only an outline"""
    is_group: bool = False


@dataclass(frozen=True, kw_only=True)
class Line:
    x1: float
    y1: float
    x2: float
    y2: float


@dataclass(frozen=True, kw_only=True)
class Diagram:
    """Boxes over lines."""

    label: str
    width: float
    height: float
    boxes: Sequence[Box]
    lines: Sequence[Line] = ()


def diagram_svg(diagram: Diagram) -> str:
    """The diagram as one SVG element."""
    lines = "".join(
        f"<line class='limit' x1='{line.x1:.1f}' y1='{line.y1:.1f}' x2='{line.x2:.1f}' y2='{line.y2:.1f}'/>"
        for line in diagram.lines
    )
    size = f"viewBox='0 0 {diagram.width:g} {diagram.height:g}'"
    boxes = "".join(map(_box, diagram.boxes))
    return f"<svg {size} role='img' aria-label='{escape(diagram.label)}'>{lines}{boxes}</svg>"


def _box(box: Box) -> str:
    paint = f"fill='var(--{box.fill})' fill-opacity='0.18'" if box.fill else "fill='var(--card)'"
    place = f"x='{box.x:.1f}' y='{box.y:.1f}' width='{box.width:.1f}' height='{box.height:.1f}'"
    rect = f"<rect {place} rx='5' {paint} stroke='var(--{box.fill or 'line'})'/>"
    if not box.text:
        return rect
    y = box.y + (16 if box.is_group else box.height / 2 + 4)
    text = fitted(box.text, box.width)
    return f"{rect}<text x='{box.x + box.width / 2:.1f}' y='{y:.1f}' text-anchor='middle'>{escape(text)}</text>"


def fitted(text: str, width: float) -> str:
    """The text, shortened to what fits a width."""
    most = max(2, int(width / LETTER))
    return text if len(text) <= most else text[: most - 1] + "…"
