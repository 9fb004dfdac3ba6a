"""Charts and diagrams of a report as HTML (with SVG), as SVG files, and as PNG for formats that take pictures."""

from __future__ import annotations

from armillary.documents.blocks import Chart, Picture, Report
from armillary.documents.writers.typesetting import typeset
from armillary.report.bars import Bar, BarGroup, bars, series_bars
from armillary.report.charts import SERIES_COLOURS, legend, lines
from armillary.report.diagram import diagram_svg
from armillary.report.standalone import colours, standalone_svg

PICTURE = b"""
#set page(width: 17cm, height: auto, margin: 2pt)
#set text(size: 8pt, font: ("Liberation Sans", "DejaVu Sans", "Noto Sans CJK SC", "Libertinus Serif"))
#let drawing = json(bytes(sys.inputs.drawing))
#image(bytes(drawing.svg), format: "svg", width: 100%)
#for entry in drawing.legend [#box(width: 7pt, height: 7pt, fill: rgb(entry.at(0))) #h(2pt)#text(entry.at(1)) #h(10pt)]
"""
MOST_BARS = 24
"""categories of a bar chart that are drawn; tables have all"""


def chart_html(report: Report, chart: Chart) -> str:
    """The chart as the report pages draw it."""

    def text(value: float) -> str:
        unit = chart.series[0][1][0].unit
        return report.figures.notation.text(value, unit, short=True)

    if chart.kind == "span":
        return _spans(report, chart)
    if chart.kind == "line":
        series = [
            (name, [(float(x), amount.value) for x, amount in zip(chart.categories, amounts, strict=True)])
            for name, amounts in chart.series
        ]
        return lines(series, label=chart.caption, x_name=chart.x_name, y_text=text)
    if chart.limit is not None:
        return _bars_with_limit(report, chart, text)
    rows = [
        (name, [amounts[i].value for _, amounts in chart.series]) for i, name in enumerate(chart.categories[:MOST_BARS])
    ]
    return series_bars(rows, [name for name, _ in chart.series], label=chart.caption, text=text)


def _spans(report: Report, chart: Chart) -> str:
    (_, begins), (_, lengths) = chart.series
    rows = zip(chart.categories, begins, lengths, strict=True)
    groups = [
        BarGroup(name=name, bars=[Bar(value=length.value, begin=begin.value, text=report.cell_text(length))])
        for name, begin, length in rows
    ]
    return bars(groups, label=chart.caption)


def _bars_with_limit(report: Report, chart: Chart, text: object) -> str:
    assert chart.limit is not None and callable(text)
    name, limit = chart.limit
    values = chart.series[0][1]
    groups = [
        BarGroup(name=category, bars=[Bar(value=amount.value, text=text(amount.value))])
        for category, amount in zip(chart.categories, values, strict=True)
    ]
    drawn = bars(groups, label=chart.caption, full=max(limit.value, *(a.value for a in values)), limit=limit.value)
    return drawn + legend([("var(--bad)", f"{name}: {text(limit.value)}")])


def axis_format(report: Report, chart: Chart) -> str:
    """Number format of the values of a native chart, scaled to their size."""
    unit = chart.series[0][1][0].unit
    largest = max((abs(amount.value) for _, amounts in chart.series for amount in amounts), default=0.0)
    if unit == "money":
        symbol = report.figures.notation.symbol
        scaled = '#,##0.0,,"M"' if largest >= 2e6 else '#,##0,"k"' if largest >= 2e4 else "#,##0"
        return f'"{symbol}"{scaled}'
    if unit == "B":
        return '#,##0,,," GB"' if largest >= 1e10 else '#,##0.0,,," GB"'
    if unit == "days":
        return '0" d"'
    return '0.###" s"' if unit == "s" else "General"


def native_title(report: Report, chart: Chart) -> str:
    """Title of a native chart, with the limit that it has no line for."""
    if chart.limit is None:
        return chart.caption
    return f"{chart.caption} ({chart.limit[0]}: {report.cell_text(chart.limit[1])})"


def drawing_svg(report: Report, block: Chart | Picture) -> str:
    """The drawing as a file of its own."""
    html = chart_html(report, block) if isinstance(block, Chart) else diagram_svg(block.diagram)
    return standalone_svg(html)


def legend_of(report: Report, block: Chart | Picture) -> list[tuple[str, str]]:
    """(colour, name) of what the drawing shows; empty where one series needs none."""
    if isinstance(block, Picture):
        return []
    if block.limit is not None:
        name, limit = block.limit
        return [(colours()["bad"], f"{name}: {report.cell_text(limit)}")]
    if len(block.series) < 2 or block.kind == "span":
        return []
    names = [name for name, _ in block.series]
    return [(colours()[SERIES_COLOURS[i].split("--")[1][:-1]], name) for i, name in enumerate(names)]


def drawing_png(report: Report, block: Chart | Picture, ppi: int = 150) -> bytes:
    """The drawing with its legend as a picture, set by typst."""
    drawing = {"svg": drawing_svg(report, block), "legend": legend_of(report, block)}
    return typeset(PICTURE, "drawing", drawing, "png", ppi=ppi)
