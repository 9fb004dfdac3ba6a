"""A report as one HTML page in the style of all report pages."""

from pathlib import Path

from armillary.documents.blocks import Block, Bullets, Chart, Paragraph, Picture, Report, Table
from armillary.documents.user_files import logo_bytes
from armillary.documents.writers.drawings import chart_html
from armillary.documents.writers.figure_table import COLUMNS, TITLE, figure_rows
from armillary.report.diagram import diagram_svg
from armillary.report.page import document, heading, items, note, paragraph, picture, section, table


def write_html(report: Report, path: Path) -> None:
    path.write_text(html_page(report), encoding="utf-8")


def html_page(report: Report) -> str:
    under = report.byline(report.subtitle)
    parts = [_logo(report), heading(report.title, under)]
    parts += [section(part.title, "".join(_block(report, block) for block in part.blocks)) for part in report.sections]
    parts.append(section(TITLE, table(COLUMNS, figure_rows(report), wide=True)))
    return document(report.title, parts)


def _logo(report: Report) -> str:
    """The logo inside the page, which loads nothing."""
    data = logo_bytes(report.logo)
    return picture(data, report.company or "logo") if data else ""


def _block(report: Report, block: Block) -> str:
    match block:
        case Paragraph(text=text):
            return paragraph(text)
        case Bullets(texts=texts):
            return items(texts)
        case Table(caption=caption, columns=columns, total=total):
            return note(caption) + table(columns, report.texts(block), wide=True, total=total)
        case Chart(caption=caption):
            return note(caption) + chart_html(report, block)
        case Picture(caption=caption, diagram=diagram):
            return note(caption) + diagram_svg(diagram)
    raise AssertionError(f"no page for {block}")
