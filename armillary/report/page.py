"""A report as one HTML file that loads nothing: the frame and style sheet all our pages share, sections and tables.

It fits a phone and a desktop, by day and by night; every text that is handed in is escaped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from string import Template

_LONG = 24
"""characters from which a name in the first column may break"""


def document(title: str, parts: Iterable[str]) -> str:
    """The whole file; `parts` are HTML, empty ones are left out."""
    template = Template((files("armillary") / "report/page.html").read_text(encoding="utf-8"))
    return template.substitute(title=escape(title), body="\n".join(filter(None, parts)))


def heading(title: str, below: str) -> str:
    """The first lines of a page."""
    return f"<h1>{escape(title)}</h1>\n<div class='sub'>{escape(below)}</div>"


def section(title: str, inside: str) -> str:
    """A card; `inside` is HTML. Nothing inside, no card."""
    return f"<section><h2>{escape(title)}</h2>{inside}</section>" if inside else ""


def side_by_side(*parts: str) -> str:
    """In two columns where the screen is wide enough."""
    there = [part for part in parts if part]
    return f"<div class='two'>{''.join(there)}</div>" if len(there) > 1 else "".join(there)


def items(texts: Iterable[str], *, numbered: bool = False, kind: str = "") -> str:
    """A list of plain texts."""
    tag, of_kind = "ol" if numbered else "ul", f" class='{kind}'" if kind else ""
    lines = "".join(f"<li{of_kind}>{escape(text)}</li>" for text in texts)
    return f"<{tag}>{lines}</{tag}>" if lines else ""


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """(colour, name) of what a plot shows."""
    spans = "".join(f"<span><i style='background:{colour}'></i>{escape(name)}</span>" for colour, name in entries)
    return f"<div class='legend'>{spans}</div>"


# --- drawings


@dataclass(frozen=True, kw_only=True)
class Frame:
    """The room of a drawing, in pixels."""

    width: int
    """of all of it"""
    height: int
    """of all of it"""
    left: int
    """margin for what stands beside the upright axis"""
    right: int = 16
    """margin"""
    top: int = 16
    """margin"""
    bottom: int = 40
    """margin for what stands below"""

    @property
    def across(self) -> int:
        """Between the margins."""
        return self.width - self.left - self.right

    @property
    def up(self) -> int:
        return self.height - self.top - self.bottom

    @property
    def end(self) -> int:
        """Where the right margin begins."""
        return self.width - self.right

    @property
    def floor(self) -> int:
        """Where the lower margin begins."""
        return self.height - self.bottom

    @property
    def middle(self) -> float:
        return (self.left + self.end) / 2


def drawing(draw: Callable[[Frame], str], label: str, frames: tuple[Frame, Frame]) -> str:
    """What `draw` makes, as SVG, once for wide screens and once for narrow ones, where letters would be too small."""
    kinds = zip(("on-wide", "on-narrow"), frames, strict=True)
    return "".join(
        f"<svg class='{kind}' viewBox='0 0 {frame.width} {frame.height}' role='img' aria-label='{escape(label)}'>"
        f"{draw(frame)}</svg>"
        for kind, frame in kinds
    )


# --- tables


class Hover(str):
    """A cell's text with more to say when it is pointed at."""

    more: str

    def __new__(cls, text: str, more: str) -> Hover:
        made = super().__new__(cls, text)
        made.more = more
        return made


class Below(str):
    """A cell's text with a second line under it."""

    more: str

    def __new__(cls, text: str, more: str) -> Below:
        made = super().__new__(cls, text)
        made.more = more
        return made


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, wide: bool = False) -> str:
    """Rows under headings, numbers to the right; `wide` lets texts break. It scrolls where the screen is narrow."""
    cells = [list(row) for row in rows]
    kinds = [_kind(column, [row[column] for row in cells]) for column in range(len(heads))]
    head = "".join(f"<th{kind}>{escape(text)}</th>" for kind, text in zip(kinds, heads, strict=True))
    body = "".join(f"<tr>{''.join(map(_cell, kinds, row))}</tr>" for row in cells)
    return (
        f"<div class='scroll'><table{' class=' + repr('wide') if wide else ''}>"
        f"{f'<tr>{head}</tr>' if any(heads) else ''}{body}</table></div>"
    )


def _cell(kind: str, text: str) -> str:
    title = f' title="{escape(text.more, quote=True)}"' if isinstance(text, Hover) else ""
    below = f"<div class='note'>{escape(text.more)}</div>" if isinstance(text, Below) else ""
    return f"<td{kind}{title}>{escape(text)}{below}</td>"


def _kind(column: int, texts: Sequence[str]) -> str:
    """Numbers to the right; long names in the first column may break."""
    known = [text for text in texts if text != "–"]
    if known and all(text.lstrip("+−-±$")[:1].isdigit() or text == "exact" for text in known):
        return " class='number'"
    return " class='name'" if column == 0 and any(len(text) > _LONG for text in known) else ""
