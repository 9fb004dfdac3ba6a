"""A report as slides: 8 to 12 of them, with native charts and shapes that can be edited."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from armillary.documents.blocks import Chart, Picture, Report, Section, Table
from armillary.documents.user_files import logo_bytes
from armillary.documents.values import clean, displayed_length
from armillary.documents.writers.columns import column_shares
from armillary.documents.writers.drawings import axis_format, native_title
from armillary.documents.writers.slide_parts import WIDTH, colour_series, hex_of, opened, tint, write_run
from armillary.errors import missing
from armillary.report.diagram import Box, Diagram, fitted
from armillary.report.standalone import colours

MOST_SLIDES, MOST_COLUMNS = 12, 6
ROW, ROW_OF_TWO = 0.44, 0.36
"""inches of a row, some of which have two lines; of a table of two columns"""
MARGIN = 0.6
"""inches"""
TOP, LINE, LETTERS = 1.25, 0.29, 118
"""inches to the text, per line of it, and letters on a line"""
TITLE_LETTERS = 74
"""of a title that fits above what is below it; a longer one is set smaller"""
LONGEST_POINT, LONGEST_CELL = 330, 76
ORDER = [
    "summary",
    "measured",
    "training",
    "capacity",
    "bill",
    "topology",
    "cost",
    "sensitivity",
    "alternatives",
    "risks",
    "timeline",
    "assumptions",
]
"""sections with slides, in the order of a talk; the last are left out first"""
TABLE_FIRST = ("summary", "capacity", "bill", "alternatives", "risks")
"""sections whose table says more than their chart"""


def write_pptx(report: Report, path: Path) -> None:
    try:
        import pptx  # noqa: F401
    except ModuleNotFoundError:
        raise missing("python-pptx", "slides", "documents") from None
    writer = SlideWriter(report)
    writer.title()
    for section in slide_sections(report):
        writer.section(section)
    writer.deck.save(str(path))


def slide_sections(report: Report) -> list[Section]:
    """At most eleven after the title."""
    by_key = {section.key: section for section in report.sections if section.points}
    return [by_key[key] for key in ORDER if key in by_key][: MOST_SLIDES - 1]


class SlideWriter:
    """One presentation while it is written."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.deck = opened(report.template(".pptx"))
        self.scale = self.deck.slide_width / 914_400 / WIDTH

    def title(self) -> None:
        report = self.report
        slide = self._slide()
        if logo := logo_bytes(report.logo):
            slide.shapes.add_picture(BytesIO(logo), self._at(MARGIN), self._at(0.6), height=self._at(0.9))
        title = clean(report.title, 140)
        size = 34 if displayed_length(title) <= TITLE_LETTERS else 20
        self._text(slide, [title], y=2.3, height=1.6, size=size, bold=True, colour="accent")
        under = report.byline(most=110)
        self._text(slide, [clean(report.subtitle, 140), under], y=4.1, height=1.4, size=18, colour="dim")

    def section(self, section: Section) -> None:
        slide = self._slide()
        self._text(slide, [clean(section.title, 80)], y=0.35, height=0.8, size=26, bold=True, colour="accent")
        shown = _shown(section)
        points = [clean(point, LONGEST_POINT) for point in section.points][
            : 2 if shown and section.key != "summary" else 7
        ]
        is_side_by_side = section.key == "summary" or shown is None
        lines = sum(-(-len(point) // LETTERS) for point in points)
        height = 5.6 if is_side_by_side else LINE * lines + 0.25
        half = 6.7 if shown is not None and is_side_by_side else None
        self._text(
            slide, points, y=TOP, height=height, width=half, size=16 if is_side_by_side else 14, bullets=len(points) > 1
        )
        if shown is not None:
            below = TOP + height + 0.1
            box = (
                (7.6, TOP, WIDTH - 7.6 - MARGIN, 5.4)
                if is_side_by_side
                else (MARGIN, below, WIDTH - 2 * MARGIN, 6.8 - below)
            )
            self._show(slide, shown, *box)

    def _show(
        self, slide: Any, block: Table | Chart | Picture, x: float, y: float, width: float, height: float
    ) -> None:
        match block:
            case Chart():
                self._chart(slide, block, x, y, width, height)
            case Picture(diagram=diagram):
                self._diagram(slide, diagram, x, y, width, height)
            case Table():
                self._table(slide, block, x, y, width, height)

    # --- shapes

    def _slide(self) -> Any:
        layouts = self.deck.slide_layouts
        blank = next((layout for layout in layouts if layout.name == "Blank"), layouts[-1])
        slide = self.deck.slides.add_slide(blank)
        for placeholder in list(slide.placeholders):
            placeholder._element.getparent().remove(placeholder._element)
        return slide

    def _at(self, inches: float) -> int:
        return int(inches * 914_400 * self.scale)

    def _text(
        self,
        slide: Any,
        texts: Sequence[str],
        *,
        y: float,
        height: float,
        size: float,
        width: float | None = None,
        bold: bool = False,
        colour: str = "ink",
        bullets: bool = False,
    ) -> None:
        box = slide.shapes.add_textbox(
            self._at(MARGIN), self._at(y), self._at(width or WIDTH - 2 * MARGIN), self._at(height)
        )
        frame = box.text_frame
        frame.word_wrap = True
        for i, text in enumerate(texts):
            paragraph = frame.paragraphs[0] if i == 0 else frame.add_paragraph()
            write_run(paragraph, f"• {text}" if bullets else text, size * self.scale, bold=bold, colour=colour)
            paragraph.space_after = int(5 * 12_700 * self.scale)

    def _table(self, slide: Any, block: Table, x: float, y: float, width: float, height: float) -> None:
        columns = list(block.columns)[:MOST_COLUMNS]
        rows = [[clean(text, LONGEST_CELL) for text in row[:MOST_COLUMNS]] for row in self.report.texts(block)]
        most = int(height / (ROW if len(columns) > 2 else ROW_OF_TWO)) - 1
        shown = rows if len(rows) <= most else rows[: most - 1]
        more = len(rows) - len(shown)
        high = 0.36 * (len(shown) + 1)
        shape = slide.shapes.add_table(
            len(shown) + 1, len(columns), self._at(x), self._at(y), self._at(width), self._at(high)
        )
        size = (12 if len(columns) <= 4 and width > 6 else 10.5) * self.scale
        shares = column_shares(columns, shown)
        for column, share in zip(shape.table.columns, shares, strict=True):
            column.width = int(self._at(width) * share)
        most_letters = [max(8, int(2 * width * share * 72 / (0.62 * size / self.scale))) for share in shares]
        for i, row in enumerate([columns, *shown]):
            texts = [clean(text, most) for text, most in zip(row, most_letters, strict=True)]
            for cell, text in zip(shape.table.rows[i].cells, texts, strict=True):
                cell.margin_top = cell.margin_bottom = self._at(0.03)
                write_run(cell.text_frame.paragraphs[0], text, size, bold=i == 0, colour="card" if i == 0 else "ink")
        if more:
            note = f"{more:,} more rows are in the document and in the workbook."
            self._text(slide, [note], y=6.85, height=0.4, size=11, colour="dim")

    def _chart(self, slide: Any, block: Chart, x: float, y: float, width: float, height: float) -> None:
        from pptx.chart.data import CategoryChartData
        from pptx.dml.color import RGBColor
        from pptx.enum.chart import XL_CHART_TYPE, XL_LEGEND_POSITION
        from pptx.util import Pt

        data = CategoryChartData(number_format=axis_format(self.report, block))
        data.categories = [clean(name, 40) for name in block.categories]
        for name, amounts in block.series:
            data.add_series(clean(name, 60), [amount.value for amount in amounts])
        kinds = {"line": XL_CHART_TYPE.LINE, "bar": XL_CHART_TYPE.BAR_CLUSTERED, "span": XL_CHART_TYPE.BAR_STACKED}
        place = (self._at(x), self._at(y), self._at(width), self._at(height))
        chart = slide.shapes.add_chart(kinds[block.kind], *place, data).chart
        chart.font.size = Pt(12 * self.scale)
        chart.has_title = True
        chart.chart_title.text_frame.text = clean(native_title(self.report, block), 90)
        chart.chart_title.text_frame.paragraphs[0].font.size = Pt(14 * self.scale)
        chart.has_legend = len(block.series) > 1 and block.kind != "span"
        if chart.has_legend:
            chart.legend.position = XL_LEGEND_POSITION.BOTTOM
            chart.legend.include_in_layout = False
        chart.value_axis.tick_labels.number_format = axis_format(self.report, block)
        chart.value_axis.tick_labels.number_format_is_linked = False
        chart.value_axis.major_gridlines.format.line.color.rgb = RGBColor.from_string(hex_of(colours()["line"]))
        colour_series(chart, block)

    def _diagram(self, slide: Any, diagram: Diagram, x: float, y: float, width: float, height: float) -> None:
        """The diagram with shapes of the format, so that it can be edited."""
        unit = min(width / diagram.width, height / diagram.height)
        left = x + (width - unit * diagram.width) / 2
        for line in diagram.lines:
            ends = (left + line.x1 * unit, y + line.y1 * unit, left + line.x2 * unit, y + line.y2 * unit)
            slide.shapes.add_connector(1, *map(self._at, ends))
        for box in diagram.boxes:
            self._box(slide, box, left, y, unit)

    def _box(self, slide: Any, box: Box, left: float, top: float, unit: float) -> None:
        from pptx.dml.color import RGBColor
        from pptx.enum.shapes import MSO_SHAPE
        from pptx.enum.text import MSO_ANCHOR, PP_ALIGN

        place = (left + box.x * unit, top + box.y * unit, box.width * unit, box.height * unit)
        shape = slide.shapes.add_shape(MSO_SHAPE.ROUNDED_RECTANGLE, *map(self._at, place))
        shape.adjustments[0] = 0.05
        shape.fill.solid()
        shape.fill.fore_color.rgb = RGBColor.from_string(tint(box.fill))
        shape.line.color.rgb = RGBColor.from_string(colours()[box.fill or "line"].lstrip("#").upper())
        shape.shadow.inherit = False
        frame = shape.text_frame
        frame.margin_left = frame.margin_right = frame.margin_top = frame.margin_bottom = 0
        frame.vertical_anchor = MSO_ANCHOR.TOP if box.is_group else MSO_ANCHOR.MIDDLE
        if box.text:
            write_run(frame.paragraphs[0], fitted(box.text, box.width), 12 * unit * 72 * self.scale, colour="ink")
            frame.paragraphs[0].alignment = PP_ALIGN.CENTER


def _shown(section: Section) -> Table | Chart | Picture | None:
    """The one block of a section that its slide shows."""
    blocks = [block for block in section.blocks if isinstance(block, Table | Chart | Picture)]
    tables = [block for block in blocks if isinstance(block, Table)]
    drawn = [block for block in blocks if not isinstance(block, Table)]
    ordered = [*tables, *drawn] if section.key in TABLE_FIRST else [*drawn, *tables]
    return ordered[0] if ordered else None
