"""Charts as inline SVG in the style of the report pages: lines, areas and log-log scatter over axes.

Every chart is drawn twice, for wide and for narrow screens. Values become text through functions that the
caller passes, and every text is escaped.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape
from math import atan2, ceil, degrees, floor, log10, sqrt
from typing import Self
from unicodedata import east_asian_width

SERIES_COLOURS = tuple(f"var(--{name})" for name in ("one", "two", "three", "four", "five", "six"))
SHARE_TICKS = (0.0, 0.25, 0.5, 0.75, 1.0)
SMALLEST_RADIUS, LARGEST_RADIUS = 4.0, 30.0
"""of a scatter point, in a chart for a wide screen"""
MAX_LINE_POINTS = 1200
LETTER_SIZE, WIDE, NARROW = 14, frozenset("mwMW@%…"), frozenset("fijlrtI.,:;'|!()[] ")
"""pixels in a file of its own, and letters much wider and narrower than the mean of DejaVu Sans"""

Text = Callable[[float], str]
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class Frame:
    """Size and margins of a chart in pixels; the left and the lower margin hold the labels of the axes."""

    width: int
    height: int
    left: int
    right: int = 16
    top: int = 16
    bottom: int = 40

    @property
    def across(self) -> int:
        """Width between the margins."""
        return self.width - self.left - self.right

    @property
    def up(self) -> int:
        """Height between the margins."""
        return self.height - self.top - self.bottom

    @property
    def end(self) -> int:
        """Where the right margin begins."""
        return self.width - self.right

    @property
    def floor(self) -> int:
        """Where the lower margin begins."""
        return self.height - self.bottom

    def with_left(self, labels: Iterable[str]) -> Self:
        """With a left margin that holds these labels of the y axis."""
        return replace(self, left=max(self.left, ceil(max(map(text_width, labels), default=0.0)) + 12))

    @property
    def middle(self) -> float:
        return (self.left + self.end) / 2


LINE_FRAMES = (Frame(width=960, height=300, left=76, right=28), Frame(width=420, height=250, left=60, right=22))
SCATTER_FRAMES = (
    Frame(width=960, height=460, left=112, right=34, top=18, bottom=44),
    Frame(width=420, height=340, left=84, right=24, top=18, bottom=44),
)


def drawing(draw: Callable[[Frame], str], label: str, frames: tuple[Frame, Frame]) -> str:
    """What `draw` returns as SVG, for wide screens and for narrow ones, where scaled letters would be too small."""
    kinds = zip(("on-wide", "on-narrow"), frames, strict=True)
    return "".join(
        f"<svg class='{kind}' viewBox='0 0 {frame.width} {frame.height}' role='img' aria-label='{escape(label)}'>"
        f"{draw(frame)}</svg>"
        for kind, frame in kinds
    )


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """(colour, name) of each series."""
    spans = "".join(f"<span><i style='background:{colour}'></i>{escape(name)}</span>" for colour, name in entries)
    return f"<div class='legend'>{spans}</div>"


def text_width(text: str) -> float:
    """Pixels that a text takes, at most: DejaVu Sans is the widest of the fonts that may be there."""
    wide = sum(letter in WIDE or east_asian_width(letter) in "WF" for letter in text)
    narrow = sum(letter in NARROW for letter in text)
    return LETTER_SIZE * (wide + 0.4 * narrow + 0.66 * (len(text) - wide - narrow))


def number_text(value: float) -> str:
    return f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"


def share_text(value: float) -> str:
    return f"{value:.0%}"


# --- axes


@dataclass(frozen=True)
class Axes:
    """Data to pixels between the first and the last ticks; `log` axes have powers of ten as ticks."""

    frame: Frame
    xs: Sequence[float]
    ys: Sequence[float]
    log: bool = False

    def x(self, value: float) -> float:
        return self.frame.left + self._fraction(value, self.xs) * self.frame.across

    def y(self, value: float) -> float:
        return self.frame.floor - self._fraction(value, self.ys) * self.frame.up

    def _fraction(self, value: float, ticks: Sequence[float]) -> float:
        low, high = ticks[0], ticks[-1]
        if self.log:
            return log10(value / low) / log10(high / low)
        return (value - low) / (high - low)

    def grid(self, x_text: Text, y_text: Text, x_name: str) -> str:
        """Grid lines (vertical ones on log axes only), tick labels and the name of the x axis."""
        frame, parts = self.frame, list[str]()
        for tick in self.ys:
            y = self.y(tick)
            parts.append(f"<line class='grid' x1='{frame.left}' x2='{frame.end}' y1='{y:.1f}' y2='{y:.1f}'/>")
            parts.append(_label(frame.left - 8, y + 4, y_text(tick), "end"))
        for tick in self.xs:
            x = self.x(tick)
            if self.log:
                parts.append(f"<line class='grid' x1='{x:.1f}' x2='{x:.1f}' y1='{frame.top}' y2='{frame.floor}'/>")
            parts.append(_label(x, frame.floor + 17, x_text(tick), "middle"))
        return "".join(parts) + _label(frame.middle, frame.height - 6, x_name, "middle")


def _label(x: float, y: float, text: str, anchor: str) -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}'>{escape(text)}</text>"


def mark(frame: Frame, x: float, text: str = "") -> str:
    """A dashed vertical line, with its text on the side that has more space."""
    line = f"<line class='mark' x1='{x:.1f}' x2='{x:.1f}' y1='{frame.top}' y2='{frame.floor}'/>"
    side, anchor = (x + 6, "start") if x < frame.middle else (x - 6, "end")
    return line + (_label(side, frame.top + 12, text, anchor) if text else "")


# --- lines


def lines(
    series: Sequence[tuple[str, Points]],
    *,
    label: str,
    x_name: str,
    x_text: Text = number_text,
    y_text: Text = number_text,
    y_ticks: Sequence[float] = (),
    marks: Sequence[tuple[float, str]] = (),
    above: float = 0.0,
) -> str:
    """Lines over common axes; the y axis begins at 0 or at a round value below `above`. `marks` are (x, text)."""
    series = [(name, points) for name, points in series if points]
    if not series:
        return ""
    xs = _ticks(max(x for _, points in series for x, _ in points))
    ys = list(y_ticks) or _ticks(max(y for _, points in series for _, y in points))
    while above and len(ys) > 2 and ys[1] <= above:
        ys = ys[1:]
    colours = [SERIES_COLOURS[i % len(SERIES_COLOURS)] for i in range(len(series))]

    def draw(frame: Frame) -> str:
        frame = frame.with_left(map(y_text, ys))
        axes = Axes(frame, xs, ys)
        parts = [axes.grid(x_text, y_text, x_name), *(mark(frame, axes.x(at), text) for at, text in marks)]
        for colour, (name, points) in zip(colours, series, strict=True):
            path = " ".join(f"{axes.x(x):.1f},{axes.y(y):.1f}" for x, y in thinned(points))
            parts.append(
                f"<polyline points='{path}' fill='none' stroke='{colour}' stroke-width='1.8'>"
                f"<title>{escape(name)}</title></polyline>"
            )
        return "".join(parts)

    return drawing(draw, label, LINE_FRAMES) + legend(zip(colours, (name for name, _ in series), strict=True))


def area(points: Points, *, label: str, x_name: str, x_text: Text, y_text: Text, peak: tuple[float, float]) -> str:
    """A filled step line from 0, with its peak marked."""
    xs, ys = _ticks(max(x for x, _ in points)), _ticks(peak[1])

    def draw(frame: Frame) -> str:
        frame = frame.with_left(map(y_text, ys))
        axes = Axes(frame, xs, ys)
        (start, value), *rest = thinned(points)
        first = f"M{axes.x(start):.1f},{axes.y(value):.1f}"
        line = first + "".join(f"H{axes.x(x):.1f}V{axes.y(y):.1f}" for x, y in rest)
        return (
            f"{axes.grid(x_text, y_text, x_name)}"
            f"<path class='area' d='{line}V{frame.floor}H{axes.x(start):.1f}Z'/><path class='edge' d='{line}'/>"
            f"<circle cx='{axes.x(peak[0]):.1f}' cy='{axes.y(peak[1]):.1f}' r='4' fill='var(--bad)'/>"
        )

    return drawing(draw, label, LINE_FRAMES)


def _ticks(most: float) -> list[float]:
    """From 0 to the largest value or beyond, in three to six steps of 1, 2, 2.5 or 5 times a power of ten; 0 and 1
    where all is 0."""
    if most <= 0:
        return [0.0, 1.0]
    power = 10.0 ** floor(log10(most))
    step = next(share * power for share in (0.2, 0.25, 0.5, 1.0, 2.0) if share * power * 6 >= most)
    return [step * i for i in range(ceil(most / step - 1e-9) + 1)]


def thinned(points: Points, most: int = MAX_LINE_POINTS) -> list[tuple[float, float]]:
    """At most about `most` points: the lowest and the highest of every run of neighbours, so that no peak is lost."""
    if len(points) <= most:
        return list(points)
    size = ceil(2 * len(points) / most)
    extremes = list[tuple[float, float]]()
    for start in range(0, len(points), size):
        part = points[start : start + size]
        ends = {min(range(len(part)), key=lambda i: part[i][1]), max(range(len(part)), key=lambda i: part[i][1])}
        extremes += [part[i] for i in sorted(ends)]
    return extremes if extremes[-1] == points[-1] else [*extremes, points[-1]]


# --- scatter


@dataclass(frozen=True, kw_only=True)
class Point:
    """One circle of a scatter chart; its area is proportional to its weight."""

    x: float
    y: float
    weight: float
    colour: str
    hover: str


def scatter(
    points: Sequence[Point],
    *,
    label: str,
    x_name: str,
    y_text: Text,
    slope: tuple[float, str] | None = None,
    levels: Sequence[tuple[float, str, str]] = (),
) -> str:
    """Points on logarithmic axes under their limits: `slope` (y per x, text) and `levels` (y, text, text on hovering),
    each from where it meets the slope."""
    xs, ys = [point.x for point in points], [point.y for point in points]
    if slope:
        xs += [level / slope[0] for level, _, _ in levels]
        ys.append(min(xs) * slope[0])
    x_ticks, y_ticks = _decades(xs), _decades([*ys, *(level for level, _, _ in levels)])
    heaviest = max(point.weight for point in points)

    def draw(frame: Frame) -> str:
        axes = Axes(frame, x_ticks, y_ticks, log=True)
        largest = LARGEST_RADIUS * min(1.0, frame.width / SCATTER_FRAMES[0].width)
        circles = "".join(
            f"<circle class='point' cx='{axes.x(point.x):.1f}' cy='{axes.y(point.y):.1f}' "
            f"r='{max(SMALLEST_RADIUS, largest * sqrt(point.weight / heaviest)):.1f}' fill='{point.colour}'>"
            f"<title>{escape(point.hover)}</title></circle>"
            for point in points
        )
        return (
            axes.grid(_power_text, y_text, x_name)
            + circles
            + _slope(axes, slope, levels)
            + _levels(axes, slope, levels)
        )

    return drawing(draw, label, SCATTER_FRAMES)


def _slope(axes: Axes, slope: tuple[float, str] | None, levels: Sequence[tuple[float, str, str]]) -> str:
    """The sloping limit up to the highest level, with its text along it."""
    if slope is None:
        return ""
    rate, text = slope
    top = max((level for level, _, _ in levels), default=axes.ys[-1])
    start, end = max(axes.xs[0], axes.ys[0] / rate), min(axes.xs[-1], top / rate)
    corners = " ".join(f"{axes.x(at):.1f},{axes.y(at * rate):.1f}" for at in (start, end))
    x, y = axes.x(sqrt(start * end)), axes.y(sqrt(start * end) * rate)
    angle = degrees(atan2(axes.y(1.0) - axes.y(10.0), axes.x(10.0) - axes.x(1.0)))
    label = _label(x, y - 8, text, "middle").replace("<text", f"<text transform='rotate({-angle:.1f} {x:.1f} {y:.1f})'")
    return f"<polyline class='limit' points='{corners}'/>{label}"


def _levels(axes: Axes, slope: tuple[float, str] | None, levels: Sequence[tuple[float, str, str]]) -> str:
    """The horizontal limits; a text that would cover another one is left out."""
    parts, labelled = list[str](), list[float]()
    for level, text, hover in sorted(levels, reverse=True):
        start = min(axes.xs[-1], max(axes.xs[0], level / slope[0])) if slope else axes.xs[0]
        y = axes.y(level)
        path = f"M{axes.x(start):.1f},{y:.1f}H{axes.frame.end}"
        parts.append(f"<path class='limit' d='{path}'><title>{escape(hover)}</title></path>")
        if all(abs(y - other) > 13 for other in labelled):
            labelled.append(y)
            parts.append(_label(axes.frame.end - 4, y - 5, text, "end"))
    return "".join(parts)


def _decades(values: Sequence[float]) -> list[float]:
    """The powers of ten around all values."""
    low, high = floor(log10(min(values)) - 0.1), ceil(log10(max(values)) + 0.1)
    return [10.0**power for power in range(low, max(high, low + 1) + 1)]


def _power_text(value: float) -> str:
    return f"{value:g}" if 1e-3 <= value <= 1e4 else f"1e{round(log10(value))}"
