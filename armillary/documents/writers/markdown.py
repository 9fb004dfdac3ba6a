"""A report as Markdown; charts become tables of their values."""

import re
from collections import Counter
from collections.abc import Sequence
from html import escape
from pathlib import Path

from armillary.documents.blocks import Block, Bullets, Chart, Paragraph, Picture, Report, Table
from armillary.documents.writers.figure_table import COLUMNS, TITLE, figure_rows

_MARKUP = re.compile(r"([\\`*_{}\[\]#|!~$])")


def write_markdown(report: Report, path: Path) -> None:
    path.write_text(markdown(report), encoding="utf-8")


def markdown(report: Report) -> str:
    head = f"# {escaped(report.title)}\n\n{escaped(_under(report))}\n"
    parts = [head]
    for section in report.sections:
        parts.append(f"## {escaped(section.title)}\n")
        parts += [_block(report, block) for block in section.blocks]
    parts.append(f"## {TITLE}\n")
    parts.append(_rows(COLUMNS, figure_rows(report)))
    return "\n".join(parts)


def _under(report: Report) -> str:
    return report.byline(report.subtitle)


def escaped(text: str) -> str:
    """Plain text: no character of it is markup, and a leading number or sign starts no list."""
    text = escape(text, quote=False)
    return re.sub(r"^(\d+)([.)])", r"\1\\\2", re.sub(r"^([-+=])", r"\\\1", _MARKUP.sub(r"\\\1", text)))


def _block(report: Report, block: Block) -> str:
    match block:
        case Paragraph(text=text):
            return f"{escaped(text)}\n"
        case Bullets(texts=texts):
            return "\n".join(f"- {escaped(text)}" for text in texts) + "\n"
        case Table(caption=caption, columns=columns, total=total):
            return f"**{escaped(caption)}**\n\n{_rows(columns, report.texts(block), total=total)}"
        case Chart():
            return f"**{escaped(block.caption)}**\n\n{_chart(report, block)}"
        case Picture(caption=caption, diagram=diagram):
            counts = Counter(box.text for box in diagram.boxes if box.text)
            lines = [f"- {escaped(text)}{f' (× {count} drawn)' if count > 1 else ''}" for text, count in counts.items()]
            return "\n".join([f"**{escaped(caption)}**\n", *lines]) + "\n"
    raise AssertionError(f"no markdown for {block}")


def _chart(report: Report, chart: Chart) -> str:
    rows = [
        [name, *(report.cell_text(amounts[i]) for _, amounts in chart.series)]
        for i, name in enumerate(chart.categories)
    ]
    if chart.limit:
        rows.append([chart.limit[0], report.cell_text(chart.limit[1]), *([""] * (len(chart.series) - 1))])
    return _rows((chart.x_name, *(name for name, _ in chart.series)), rows)


def _rows(columns: Sequence[str], rows: Sequence[Sequence[str]], *, total: bool = False) -> str:
    lines = [[escaped(name) for name in columns], ["---"] * len(columns)]
    lines += [[escaped(cell) for cell in row] for row in rows]
    if total and rows:
        lines[-1] = [f"**{cell}**" if cell else "" for cell in lines[-1]]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"
