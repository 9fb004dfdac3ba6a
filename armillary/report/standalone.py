"""Charts and diagrams of report pages as SVG files of their own, in the colours of light pages.

A page's charts take their colours and classes from its style sheet; a file has to bring them along.
"""

import re
from functools import cache
from html import unescape
from importlib.resources import files

_SVG = re.compile(r"<svg(?: class='(on-\w+)')? (.*?)</svg>", re.DOTALL)
_VARIABLE = re.compile(r"--(\w+): (#[0-9a-fA-F]+);")
_LEGEND = re.compile(r"<span><i style='background:(#[0-9a-fA-F]+)'></i>(.*?)</span>")
_LEGEND_HEIGHT, _LEGEND_LEFT = 24, 76
_LETTER_WIDTH = 0.55
"""about a letter's width over the size of letters"""
CHART_LETTERS, DIAGRAM_LETTERS = 14, 11
"""pixels; a chart for wide screens becomes 17 cm wide, and its letters 7 point; those of diagrams have to fit boxes"""
FONTS = "Liberation Sans, Arial, DejaVu Sans, Noto Sans CJK SC, sans-serif"


@cache
def colours() -> dict[str, str]:
    """Name -> colour, of light pages."""
    page = (files("armillary") / "report/page.html").read_text(encoding="utf-8")
    return dict(_VARIABLE.findall(page.partition("@media")[0]))


def standalone_svg(html: str, *, legend: bool = False) -> str:
    """The first drawing for wide screens in `html`, as a file, with its legend below where wanted; empty where there is
    no drawing."""
    html = re.sub(r"var\(--(\w+)\)", lambda match: colours()[match.group(1)], html)
    drawings = [match for match in _SVG.finditer(html) if match.group(1) in (None, "on-wide")]
    if not drawings:
        return ""
    body = drawings[0].group(2)
    size = CHART_LETTERS if drawings[0].group(1) else DIAGRAM_LETTERS
    style = (
        f"<style>text{{fill:{colours()['dim']};font-family:{FONTS};font-size:{size}px}}"
        f".bold{{font-weight:600;fill:{colours()['ink']}}}.grid{{stroke:{colours()['line']};stroke-width:1}}"
        f".mark{{stroke:{colours()['bad']};stroke-width:1.2;stroke-dasharray:5 4}}"
        f".limit{{stroke:{colours()['dim']};stroke-width:1.6;fill:none}}</style>"
    )
    head, _, inside = body.partition(">")
    width, height = re.search(r"viewBox='0 0 ([\d.]+) ([\d.]+)'", head).groups()  # type: ignore[union-attr]
    if legend and (entries := _LEGEND.findall(html)):
        drawn, rows = _legend(entries, float(height), float(width))
        inside += drawn
        taller = f"{float(height) + rows * _LEGEND_HEIGHT:g}"
        head, height = head.replace(f"0 0 {width} {height}", f"0 0 {width} {taller}"), taller
    return f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{height}' {head}>{style}{inside}</svg>"


def _legend(entries: list[tuple[str, str]], top: float, width: float) -> tuple[str, int]:
    """(colour, name) of each series, one after the other, in as many rows as they need; and the number of rows."""
    drawn, left, rows = "", _LEGEND_LEFT, 1
    for colour, name in entries:
        letters = round(len(unescape(name)) * _LETTER_WIDTH * CHART_LETTERS)
        if left > _LEGEND_LEFT and left + 17 + letters > width:
            left, top, rows = _LEGEND_LEFT, top + _LEGEND_HEIGHT, rows + 1
        drawn += f"<rect x='{left}' y='{top + 4:g}' width='11' height='11' rx='2' fill='{colour}'/>"
        drawn += f"<text x='{left + 17}' y='{top + 14:g}'>{name}</text>"
        left += 17 + letters + 24
    return drawn, rows
