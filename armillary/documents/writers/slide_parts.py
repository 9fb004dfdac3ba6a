"""Parts of slides: an opened deck, runs of text, colours of shapes and of the series of a chart."""

from __future__ import annotations

from io import BytesIO
from typing import Any

from armillary.documents.blocks import Chart
from armillary.documents.user_files import template_bytes
from armillary.documents.values import is_rtl
from armillary.errors import BadInput, NotFound
from armillary.report.standalone import colours

WIDTH, HEIGHT = 13.333, 7.5
"""inches of a slide of 16:9"""


def opened(template: str | None) -> Any:
    """An empty deck of 16:9, or a template without its slides."""
    from pptx import Presentation
    from pptx.util import Inches

    if template is None:
        deck = Presentation()
        deck.slide_width, deck.slide_height = Inches(WIDTH), Inches(HEIGHT)
        return deck
    try:
        deck = Presentation(BytesIO(template_bytes(template)))
    except NotFound:
        raise
    except Exception as error:  # python-pptx raises what zip and XML raise
        raise BadInput(f"the template {template} is no presentation ({error}); give a .pptx file") from None
    ids = deck.slides._sldIdLst
    for slide in list(ids):
        deck.part.drop_rel(slide.rId)
        ids.remove(slide)
    for sections in deck.part._element.xpath("//*[local-name()='sectionLst']"):  # they would name slides that are gone
        extension = sections.getparent()
        extension.getparent().remove(extension)
    return deck


def write_run(paragraph: Any, text: str, size: float, *, bold: bool = False, colour: str = "ink") -> None:
    from pptx.dml.color import RGBColor
    from pptx.enum.text import PP_ALIGN
    from pptx.util import Pt

    run = paragraph.add_run()
    run.text = text
    run.font.size, run.font.bold = Pt(max(1, round(size, 1))), bold
    run.font.color.rgb = RGBColor.from_string(hex_of(colours()[colour]))
    if is_rtl(text):
        paragraph.alignment = PP_ALIGN.RIGHT
        paragraph._p.get_or_add_pPr().set("rtl", "1")


def hex_of(colour: str) -> str:
    return colour.lstrip("#").upper()


def tint(fill: str) -> str:
    """The colour of a box: a fifth of its own over white."""
    if not fill:
        return "FFFFFF"
    value = hex_of(colours()[fill])
    parts = (int(value[i : i + 2], 16) for i in (0, 2, 4))
    return "".join(f"{round(255 - 0.18 * (255 - part)):02X}" for part in parts)


def colour_series(chart: Any, block: Chart) -> None:
    from pptx.dml.color import RGBColor

    names = ("one", "two", "three", "four")
    for i, series in enumerate(chart.plots[0].series):
        name = names[0] if block.kind == "span" else names[i % len(names)]
        colour = RGBColor.from_string(hex_of(colours()[name]))
        if block.kind == "line":
            series.format.line.color.rgb = colour
            series.smooth = False
        elif block.kind == "span" and i == 0:
            series.format.fill.background()
        else:
            series.format.fill.solid()
            series.format.fill.fore_color.rgb = colour
    if block.kind == "span":
        chart.plots[0].gap_width = 60
    if block.kind != "line":
        chart.category_axis.reverse_order = True
