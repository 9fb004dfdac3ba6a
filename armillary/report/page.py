"""HTML report pages in one file that loads nothing: the document with its style sheet, sections, lists and tables.

Pages fit phones and desktops, in light and dark mode; every text that is passed in is escaped.
"""

import re
from base64 import b64encode
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Self

_LONG = 24
"""characters from which a name in the first column may break"""
_NUMBER = re.compile(r"[+−\-±]?(?:[^\w\s(]?|CN¥|[A-Z]{3} (?=[\d,]+\.\d))\d")
"""how a number begins: a sign, a currency's symbol or code, a digit"""


def document(title: str, parts: Iterable[str]) -> str:
    """The whole file; `parts` are HTML, empty ones are left out."""
    template = Template((files("armillary") / "report/page.html").read_text(encoding="utf-8"))
    return template.substitute(title=escape(title), body="\n".join(filter(None, parts)))


def heading(title: str, below: str) -> str:
    """The first lines of a page."""
    return f"<h1>{escape(title)}</h1>\n<div class='sub'>{escape(below)}</div>"


def section(title: str, inside: str) -> str:
    """A card around `inside`, which is HTML; empty where `inside` is."""
    return f"<section><h2>{escape(title)}</h2>{inside}</section>" if inside else ""


def paragraph(text: str) -> str:
    """A paragraph of plain text."""
    return f"<p dir='auto'>{escape(text)}</p>"


def note(text: str) -> str:
    """A line in small letters, as over a table."""
    return f"<h3>{escape(text)}</h3>"


def picture(data: bytes, label: str) -> str:
    """A PNG or JPEG file as part of the page."""
    kind = "png" if data.startswith(b"\x89PNG") else "jpeg"
    return f'<img class="logo" alt="{escape(label)}" src="data:image/{kind};base64,{b64encode(data).decode()}">'


def side_by_side(*parts: str) -> str:
    """Parts in two columns where the screen is wide enough."""
    shown = [part for part in parts if part]
    return f"<div class='two'>{''.join(shown)}</div>" if len(shown) > 1 else "".join(shown)


def items(texts: Iterable[str], *, numbered: bool = False, kind: str = "") -> str:
    """A list of plain texts."""
    tag, of_kind = "ol" if numbered else "ul", f" class='{kind}'" if kind else ""
    lines = "".join(f"<li{of_kind}>{escape(text)}</li>" for text in texts)
    return f"<{tag}>{lines}</{tag}>" if lines else ""


# --- tables


class _Cell(str):
    more: str

    def __new__(cls, text: str, more: str) -> Self:
        cell = super().__new__(cls, text)
        cell.more = more
        return cell


class Hover(_Cell):
    """A cell's text with more text on hovering."""


class Below(_Cell):
    """A cell's text with a second line under it."""


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, wide: bool = False, total: bool = False) -> str:
    """Rows under headings, numbers to the right; `wide` lets texts break, `total` sets the last row apart. It scrolls
    where the screen is narrow."""
    cells = [list(row) for row in rows]
    kinds = [_kind(column, [row[column] for row in cells]) for column in range(len(heads))]
    head = "".join(f"<th{kind}>{escape(text)}</th>" for kind, text in zip(kinds, heads, strict=True))
    body = "".join(f"<tr>{''.join(map(_cell, kinds, row))}</tr>" for row in cells)
    classes = " ".join(name for name, holds in (("wide", wide), ("total", total)) if holds)
    return scrolling(
        f"<table{f' class={classes!r}' if classes else ''}>{f'<tr>{head}</tr>' if any(heads) else ''}{body}</table>"
    )


def scrolling(inside: str) -> str:
    """A table that scrolls where the screen is narrow, also by keyboard."""
    return f"<div class='scroll' tabindex='0'>{inside}</div>"


def _cell(kind: str, text: str) -> str:
    title = f' title="{escape(text.more, quote=True)}"' if isinstance(text, Hover) else ""
    below = f"<div class='note'>{escape(text.more)}</div>" if isinstance(text, Below) else ""
    return f"<td{kind}{title}>{escape(text)}{below}</td>"


def _kind(column: int, texts: Sequence[str]) -> str:
    """Numbers to the right; long names in the first column may break."""
    known = [text for text in texts if text != "–"]
    if known and all(_NUMBER.match(text) or text == "exact" for text in known):
        return " class='number'"
    return " class='name'" if column == 0 and any(len(text) > _LONG for text in known) else ""
