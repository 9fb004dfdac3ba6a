"""A report as a workbook that calculates: inputs are cells with names, everything else is a formula of these names.

Written with XlsxWriter, which stores the values beside the formulas, so that previews and readers that do not calculate
show figures too. Prose is left out: it would not follow a changed input.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from armillary.documents.blocks import Cell, Chart, Picture, Report, Section, Table
from armillary.documents.figures import Amount, Figure
from armillary.documents.formula import to_excel
from armillary.documents.writers.drawings import axis_format, drawing_png, native_title
from armillary.errors import missing

ACCENT, INPUT_FILL, HEAD_FILL, GREY = "#2F5FB3", "#FFF7E0", "#EEF2F9", "#667085"
COLOURS = ("#2F6FD0", "#D08A1F", "#1F9D8A", "#C23B6B")
GRID = {"color": "#E3E1DA", "width": 0.75}
WIDEST, LONGEST_FORMULA = 70, 8192
LINE_HEIGHT = 13.5
NOTE = "Yellow cells are inputs: change a price, a count or a utilisation, and every total in this workbook follows."
_NOT_IN_NAMES = re.compile(r"[\[\]:*?/\\]")
GUARDED = ("=", "+", "-", "@", "\t", "\r")
"""a text that begins so is marked as text, so that editing its cell makes no formula of it"""
RIGHT: dict[str, Any] = {"align": "right", "indent": 1}
"""of numbers, with a space before what follows"""
LEFT: dict[str, Any] = {"align": "left", "indent": 1}
"""of texts beside other columns"""


def write_xlsx(report: Report, path: Path) -> None:
    try:
        import xlsxwriter
    except ModuleNotFoundError:
        raise missing("XlsxWriter", "a workbook", "documents") from None
    options = {"strings_to_formulas": False, "strings_to_urls": False, "strings_to_numbers": False}
    with xlsxwriter.Workbook(str(path), options) as book:
        book.set_properties({"title": report.title[:250], "company": report.company[:250]})
        book.set_calc_mode("auto")
        writer = WorkbookWriter(report, book)
        summary, *rest = report.sections
        writer.section(summary)
        writer.inputs()
        writer.derived()
        for section in rest:
            if section.key != "assumptions":
                writer.section(section)


class WorkbookWriter:
    """One workbook while it is written."""

    def __init__(self, report: Report, book: Any) -> None:
        self.report, self.book = report, book
        self.formats: dict[tuple[Any, ...], Any] = {}
        self.sheets: set[str] = set()

    def format(self, unit: str = "", **style: Any) -> Any:
        key = (unit, *sorted(style.items()))
        if key not in self.formats:
            number = {"num_format": self.report.figures.notation.excel(unit)} if unit else {}
            self.formats[key] = self.book.add_format({"valign": "top", "font_size": 10} | number | style)
        return self.formats[key]

    # --- figures

    def inputs(self) -> None:
        rows = [figure for figure in self.report.figures if not figure.formula]
        self._figures("Inputs", rows, "source", note=NOTE)

    def derived(self) -> None:
        rows = [figure for figure in self.report.figures if figure.formula]
        self._figures("Figures", rows, "formula", note="Each value is a formula of named cells.")

    def _figures(self, title: str, rows: Sequence[Figure], last: str, note: str) -> None:
        sheet = self._sheet(title)
        self._text(sheet, 1, 0, note, self.format(font_color=GREY))
        self._header(sheet, 3, ("figure", "value", "name", last), numbers=[1])
        line, group = 4, ""
        for figure in rows:
            if figure.group != group:
                self._text(sheet, line, 0, figure.group, self.format(bold=True, font_color=ACCENT))
                line, group = line + 1, figure.group
            self._text(sheet, line, 0, figure.label)
            fill = {} if figure.formula else {"bg_color": INPUT_FILL}
            amount = Amount(value=figure.value, unit=figure.unit, formula=figure.formula)
            self._amount(sheet, line, 1, amount, **fill)
            self.book.define_name(figure.key, f"='{title}'!$B${line + 1}")
            self._text(sheet, line, 2, figure.key, self.format(font_color=GREY))
            self._cell(sheet, line, 3, figure.formula or figure.source, font_color=GREY)
            line += 1
        for column, width in enumerate((52, 22, 30, WIDEST)):
            sheet.set_column(column, column, width)
        sheet.freeze_panes(4, 2)

    # --- sections

    def section(self, section: Section) -> None:
        blocks = [block for block in section.blocks if isinstance(block, Table | Chart | Picture)]
        if not blocks:
            return
        sheet, line, widths = self._sheet(section.title), 2, [10]
        if section.key == "summary":
            self._text(sheet, 1, 0, f"{NOTE} They are on the sheet Inputs.", self.format(font_color=GREY))
            line = 3
        for block in blocks:
            if isinstance(block, Table):
                line = self._table(sheet, line, block, widths)
            elif isinstance(block, Chart):
                values = zip(*(amounts for _, amounts in block.series), strict=True)
                _widen(widths, [(name, *row) for name, row in zip(block.categories, values, strict=True)], self.report)
        for column, width in enumerate(widths):
            sheet.set_column(column, column, width)
        for block in blocks:
            if isinstance(block, Chart):
                line = self._chart(sheet, line, block)
            elif isinstance(block, Picture):
                line = self._picture(sheet, line, block)

    def _table(self, sheet: Any, line: int, table: Table, widths: list[int]) -> int:
        self._text(sheet, line, 0, table.caption, self.format(bold=True, font_color=ACCENT))
        self._header(sheet, line + 1, table.columns, numbers=_number_columns(table))
        for i, row in enumerate(table.rows):
            last = table.total and i == len(table.rows) - 1
            for column, cell in enumerate(row):
                self._cell(sheet, line + 2 + i, column, cell, **({"bold": True, "top": 1} if last else {}))
        _widen(widths, [table.columns, *table.rows], self.report)
        return line + len(table.rows) + 4

    def _chart(self, sheet: Any, line: int, chart: Chart) -> int:
        """Its values as a table, which the chart refers to, and the chart beside it."""
        series = chart.series
        self._text(sheet, line, 0, chart.caption, self.format(bold=True, font_color=ACCENT))
        heads = (chart.x_name or " ", *(name for name, _ in series))
        self._header(sheet, line + 1, heads, numbers=range(1, len(heads)))
        first, last = line + 2, line + 1 + len(chart.categories)
        for i, name in enumerate(chart.categories):
            self._text(sheet, first + i, 0, name)
            for column, (_, amounts) in enumerate(series, 1):
                self._amount(sheet, first + i, column, amounts[i])
        drawn = self._native_chart(chart, series, sheet.get_name(), first, last)
        sheet.insert_chart(line, len(series) + 2, drawn, {"object_position": 2})
        return max(last + 3, line + 17)

    def _native_chart(self, chart: Chart, series: Sequence[Any], sheet: str, first: int, last: int) -> Any:
        kinds = {"line": {"type": "line"}, "bar": {"type": "bar"}, "span": {"type": "bar", "subtype": "stacked"}}
        drawn = self.book.add_chart(kinds[chart.kind])
        for column, _ in enumerate(series, 1):
            hidden = chart.kind == "span" and column == 1
            place = 0 if chart.kind == "span" else (column - 1) % len(COLOURS)
            colour = {"none": True} if hidden else {"color": COLOURS[place]}
            drawn.add_series(
                {
                    "name": [sheet, first - 1, column],
                    "categories": [sheet, first, 0, last, 0],
                    "values": [sheet, first, column, last, column],
                    ("line" if chart.kind == "line" else "fill"): colour,
                }
            )
        drawn.set_title({"name": native_title(self.report, chart)[:250], "name_font": {"size": 11}})
        values = {"num_format": axis_format(self.report, chart), "major_gridlines": {"visible": True, "line": GRID}}
        if chart.kind != "line":
            drawn.set_y_axis({"reverse": True})
            drawn.set_x_axis(values)
        else:
            drawn.set_x_axis({"name": chart.x_name})
            drawn.set_y_axis(values)
        legend = len(series) > 1 and chart.kind != "span"
        drawn.set_legend({"position": "bottom"} if legend else {"none": True})
        drawn.set_size({"width": 640, "height": 320})
        return drawn

    def _picture(self, sheet: Any, line: int, picture: Picture) -> int:
        from io import BytesIO

        self._text(sheet, line, 0, picture.caption, self.format(bold=True, font_color=ACCENT))
        data = BytesIO(drawing_png(self.report, picture, ppi=110))
        options = {"image_data": data, "description": picture.caption[:250], "object_position": 2}
        sheet.insert_image(line + 1, 0, "topology.png", options)
        return line + 30

    # --- cells

    def _sheet(self, title: str) -> Any:
        """A new sheet; Excel allows 31 units of UTF-16 for its name, no brackets, and none twice."""
        plain = _NOT_IN_NAMES.sub(" ", title).strip().strip("'") or "sheet"
        name = next(
            name
            for number in range(1, 1000)
            if (name := plain[: 15 if not plain.isascii() else 31 - 4] + (f" {number}" if number > 1 else ""))
            and name.lower() not in self.sheets
        )
        self.sheets.add(name.lower())
        sheet = self.book.add_worksheet(name)
        self._text(sheet, 0, 0, title, self.format(bold=True, font_size=14, font_color=ACCENT))
        sheet.hide_gridlines(2)
        sheet.set_landscape()
        sheet.set_paper(9)
        sheet.fit_to_pages(1, 0)
        return sheet

    def _header(self, sheet: Any, line: int, texts: Sequence[str], numbers: Collection[int]) -> None:
        """Headings over their columns; those of `numbers` to the right, as the numbers are."""
        for column, text in enumerate(texts):
            side = RIGHT if column in numbers else LEFT if column else {}
            self._text(sheet, line, column, text, self.format(bold=True, bg_color=HEAD_FILL, bottom=1, **side))

    def _cell(self, sheet: Any, line: int, column: int, cell: Cell, **style: Any) -> None:
        if isinstance(cell, Amount):
            self._amount(sheet, line, column, cell, **style)
        else:
            wrapped, side = len(cell) > WIDEST, RIGHT if cell == "–" else LEFT if column else {}
            self._text(sheet, line, column, cell, self.format(text_wrap=wrapped, **side, **style))
            if wrapped:
                sheet.set_row(line, LINE_HEIGHT * -(-len(cell) // (WIDEST - 8)))

    def _amount(self, sheet: Any, line: int, column: int, amount: Amount, **style: Any) -> None:
        form = self.format(amount.unit or "number", **RIGHT, **style)
        if amount.formula:
            formula = f"={to_excel(amount.formula)}"
            assert len(formula) <= LONGEST_FORMULA, f"{amount.formula[:80]} is too long for a spreadsheet"
            sheet.write_formula(line, column, formula, form, amount.value)
        else:
            sheet.write_number(line, column, amount.value, form)

    def _text(self, sheet: Any, line: int, column: int, text: str, form: Any = None) -> None:
        form = form or self.format()
        if text.startswith(GUARDED):
            form = self.format(quote_prefix=True, text_wrap=len(text) > WIDEST)
        sheet.write_string(line, column, text[:32_000], form)


def _number_columns(table: Table) -> set[int]:
    """Columns without words."""
    columns = range(len(table.columns))
    return {i for i in columns if all(isinstance(row[i], Amount) or row[i] == "–" for row in table.rows)}


def _widen(widths: list[int], rows: Sequence[Sequence[Cell]], report: Report) -> None:
    """Columns as wide as what is in them: an amount as the sheet writes it, which is longer than in prose."""
    for row in rows:
        for column, cell in enumerate(row):
            length = len(report.cell_text(cell))
            if isinstance(cell, Amount):
                length = max(length, report.figures.notation.excel_length(cell.value, cell.unit or "number"))
            widths += [10] * (column + 1 - len(widths))
            widths[column] = max(widths[column], min(length + 3, WIDEST))
