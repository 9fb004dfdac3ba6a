"""Bar charts as inline SVG in the style of the report pages: groups of horizontal bars, and a stacked bar of shares."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from armillary.report.charts import SERIES_COLOURS, Frame, Text, drawing, legend, mark, text_width

BAR_HEIGHT, BAR_GAP, GROUP_GAP, NAME_HEIGHT = 15, 3, 12, 18
LETTER_WIDTH, VALUE_WIDTH = 8.2, 92
"""about one letter; at least for the value that is written at a bar's end"""
NAMES_IN_MARGIN = 0.25
"""share of the width up to which names stand in the left margin; longer ones stand above their bars"""


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One horizontal bar."""

    value: float
    text: str
    """written at its end"""
    colour: str = SERIES_COLOURS[0]
    opacity: float = 1.0
    hover: str = ""
    begin: float = 0.0
    """where it begins on the scale"""


@dataclass(frozen=True, kw_only=True)
class BarGroup:
    """Bars under one name."""

    name: str
    bars: Sequence[Bar]
    bold: bool = False


def series_bars(
    rows: Sequence[tuple[str, Sequence[float | None]]], series: Sequence[str], *, label: str, text: Text
) -> str:
    """A group of bars per row with one bar per series, and a legend; a value of None has no bar."""
    groups = [
        BarGroup(
            name=name,
            bars=[
                Bar(
                    value=value,
                    text=text(value),
                    colour=SERIES_COLOURS[place % len(SERIES_COLOURS)],
                    hover=f"{series[place]} {text(value)}",
                )
                for place, value in enumerate(values)
                if value is not None
            ],
        )
        for name, values in rows
    ]
    chart = bars(groups, label=label)
    return chart + (legend(zip(SERIES_COLOURS, series, strict=False)) if chart and len(series) > 1 else "")


def bars(groups: Sequence[BarGroup], *, label: str, full: float = 0.0, limit: float | None = None) -> str:
    """Horizontal bars from 0 on one scale, which ends at `full` or at the largest value; `limit` is a dashed line."""
    full = full or max((bar.begin + bar.value for group in groups for bar in group.bars), default=0.0)
    if not full:
        return ""
    frames = _bar_frame(groups, 960), _bar_frame(groups, 420)
    return drawing(lambda frame: _bars(groups, frame, full, limit), label, frames)


def bars_file(groups: Sequence[BarGroup], *, label: str, caption: str) -> str:
    """The same bars, in one colour, as an SVG file of their own under a caption."""
    full = max((bar.value for group in groups for bar in group.bars), default=0.0) or 1.0
    frame = _bar_frame(groups, 760, top=34)
    style = (
        ":root{--one:#2f6fd0}text{font:13px system-ui,sans-serif;fill:#4b5563}"
        "@media(prefers-color-scheme:dark){:root{--one:#6da0ee}text{fill:#c3c9d4}}"
    )
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {frame.width} {frame.height}' role='img' "
        f"aria-label='{escape(label)}'><style>{style}</style><text x='8' y='20'>{escape(caption)}</text>"
        f"{_bars(groups, frame, full, None)}</svg>\n"
    )


def _bar_frame(groups: Sequence[BarGroup], width: int, top: int = 4) -> Frame:
    """As high as its bars; names in the left margin where they fit."""
    names = 10 + max((text_width(group.name) for group in groups), default=0.0)
    in_margin = names <= NAMES_IN_MARGIN * width
    texts = [len(bar.text) for group in groups for bar in group.bars]
    height = (
        top + 4 + len(texts) * (BAR_HEIGHT + BAR_GAP) + len(groups) * (GROUP_GAP + (0 if in_margin else NAME_HEIGHT))
    )
    right = max(VALUE_WIDTH, round(10 + 0.9 * LETTER_WIDTH * max(texts, default=0)))
    return Frame(width=width, height=height, left=round(names) if in_margin else 0, right=right, top=top, bottom=4)


def _bars(groups: Sequence[BarGroup], frame: Frame, full: float, limit: float | None) -> str:
    parts, y = list[str](), float(frame.top)
    line = None if limit is None else frame.left + limit / full * frame.across
    if line is not None:
        parts.append(mark(frame, line))
    for group in groups:
        bold = " class='bold'" if group.bold else ""
        if frame.left:
            middle = y + len(group.bars) * (BAR_HEIGHT + BAR_GAP) / 2 + 3
            place = f"x='{frame.left - 10}' y='{middle:.1f}' text-anchor='end'"
        else:
            y += NAME_HEIGHT
            place = f"x='0' y='{y - 5:.1f}'"
        parts.append(f"<text {place}{bold}>{escape(_fitted(group.name, frame))}</text>")
        for bar in group.bars:
            x = frame.left + min(1.0, bar.begin / full) * frame.across
            parts.append(_bar(bar, x, y, max(1.0, min(1.0, bar.value / full) * frame.across), line))
            y += BAR_HEIGHT + BAR_GAP
        y += GROUP_GAP
    return "".join(parts)


def _fitted(name: str, frame: Frame) -> str:
    """A name that ends inside the drawing; it stands beside or above its bars."""
    most = int(frame.width / LETTER_WIDTH) - 1
    return name if frame.left or len(name) <= most else f"{name[: most - 1].rstrip()}…"


def _bar(bar: Bar, x: float, y: float, width: float, line: float | None) -> str:
    """The text stands at the bar's end, behind the line of a limit that would cross it."""
    at = x + width + 8
    if line is not None and at - 8 <= line <= at + LETTER_WIDTH * len(bar.text):
        at = line + 6
    opacity = f" opacity='{bar.opacity}'" if bar.opacity < 1 else ""
    return (
        f"<rect x='{x:g}' y='{y:.1f}' width='{width:.1f}' height='{BAR_HEIGHT}' rx='3' fill='{bar.colour}'{opacity}>"
        f"<title>{escape(bar.hover or bar.text)}</title></rect>"
        f"<text x='{at:.1f}' y='{y + BAR_HEIGHT - 3:.1f}'>{escape(bar.text)}</text>"
    )


def shares(parts: Sequence[tuple[str, float, str, str, str]]) -> str:
    """One stacked bar and its legend; of each part: name, share, colour, text after the share, text on hovering."""
    bar, entries = "", ""
    for name, share, colour, text, hover in parts:
        name, text, hover = escape(name), escape(text), escape(hover)
        bar += f"<span style='width:{share:.3%};background:{colour}' title='{name} {share:.1%}: {hover}'></span>"
        entries += (
            f"<span title='{hover}'><i style='background:{colour}'></i>{name} <b>{share:.1%}</b> "
            f"<span class='note'>{text}</span></span>"
        )
    return f"<div class='bar'>{bar}</div><div class='legend'>{entries}</div>" if parts else ""
