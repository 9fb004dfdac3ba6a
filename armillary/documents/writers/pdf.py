"""A report as PDF, typeset by typst from a template that takes the report as data."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from armillary.documents.blocks import Block, Bullets, Paragraph, Report, Table
from armillary.documents.user_files import logo_bytes, template_bytes
from armillary.documents.values import breakable
from armillary.documents.writers.columns import column_shares, number_columns
from armillary.documents.writers.drawings import drawing_svg, legend_of
from armillary.documents.writers.figure_table import COLUMNS, TITLE, figure_rows
from armillary.documents.writers.typesetting import typeset

FONTS = ("Noto Sans", "Liberation Sans", "DejaVu Sans", "Noto Sans CJK SC", "Noto Sans Arabic", "Libertinus Serif")
"""the first that is installed sets the text, the others what it lacks; the last comes with typst"""
WIDE, NARROW = 9.0, 6.5
"""points of the letters of tables with few and with many columns"""


def write_pdf(report: Report, path: Path) -> None:
    own = report.template(".typ") or ""
    source = template_bytes(own) if own else (files("armillary") / "documents/writers/report.typ").read_bytes()
    path.write_bytes(typeset(source, "report", report_data(report), "pdf", template=own))


def report_data(report: Report) -> dict[str, Any]:
    """The report as a template reads it from sys.inputs.report."""
    appendix = _table("All figures", COLUMNS, figure_rows(report), size=NARROW)
    sections = [
        {"title": breakable(section.title), "parts": [_part(report, block) for block in section.blocks]}
        for section in report.sections
    ]
    return {
        "title": breakable(report.title),
        "subtitle": breakable(report.subtitle),
        "company": report.company,
        "byline": breakable(report.byline()),
        "footer": " · ".join(filter(None, (report.company, report.title))),
        "fonts": FONTS,
        "logo": list(logo_bytes(report.logo)),
        "sections": [*sections, {"title": TITLE, "parts": [appendix]}],
    }


def _part(report: Report, block: Block) -> dict[str, Any]:
    match block:
        case Paragraph(text=text):
            return {"kind": "text", "text": breakable(text)}
        case Bullets(texts=texts):
            return {"kind": "list", "texts": [breakable(text) for text in texts]}
        case Table(caption=caption, columns=columns, total=total):
            return _table(caption, columns, report.texts(block), total=total)
    return {
        "kind": "chart",
        "caption": breakable(block.caption),
        "svg": drawing_svg(report, block),
        "legend": legend_of(report, block),
    }


def _table(
    caption: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    total: bool = False,
    size: float | None = None,
) -> dict[str, Any]:
    numbers, shares = number_columns(columns, rows), column_shares(columns, rows)
    return {
        "kind": "table",
        "caption": breakable(caption),
        "columns": [breakable(column) for column in columns],
        "rows": [[breakable(cell) for cell in row] for row in rows],
        "widths": [0 if number else round(100 * share, 2) for number, share in zip(numbers, shares, strict=True)],
        "aligns": ["right" if number else "left" for number in numbers],
        "total": total,
        "size": size or (WIDE - 0.5 if len(columns) <= 5 else WIDE - 1.5),
    }
