"""A report as a Word document: heading styles, a table of contents, numbered captions, repeated headings."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from armillary.documents.blocks import Block, Bullets, Chart, Paragraph, Picture, Report, Table
from armillary.documents.user_files import logo_bytes, template_bytes
from armillary.documents.values import is_rtl
from armillary.documents.writers.columns import column_shares, number_columns
from armillary.documents.writers.drawings import drawing_png
from armillary.documents.writers.figure_table import COLUMNS, TITLE, figure_rows
from armillary.errors import BadInput, NotFound, missing

AFTER_BIDI = tuple(
    f"w:{name}"
    for name in (
        "adjustRightInd",
        "snapToGrid",
        "spacing",
        "ind",
        "contextualSpacing",
        "mirrorIndents",
        "suppressOverlap",
        "jc",
        "textDirection",
        "textAlignment",
        "textboxTightWrap",
        "outlineLvl",
        "divId",
        "cnfStyle",
        "rPr",
        "sectPr",
        "pPrChange",
    )
)
"""elements of a paragraph's properties that the schema has after the direction: Word may refuse another order"""
ACCENT, GREY, HEAD_FILL = "2F5FB3", "667085", "EEF2F9"


def write_docx(report: Report, path: Path) -> None:
    try:
        import docx  # noqa: F401
    except ModuleNotFoundError:
        raise missing("python-docx", "a Word document", "documents") from None
    writer = WordWriter(report)
    writer.front()
    for number, section in enumerate(report.sections, 1):
        writer.section(number, section.title, section.blocks)
    writer.appendix(len(report.sections) + 1)
    writer.document.save(str(path))


class WordWriter:
    """One document while it is written."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.document = _opened(report.template(".docx"))
        self.counts = {"Table": 0, "Figure": 0}
        self._page()
        _ensure_styles(self.document)

    # --- front matter

    def _page(self) -> None:
        from docx.shared import Cm

        part = self.document.sections[0]
        if self.report.template(".docx") is None:
            part.page_width, part.page_height = Cm(21), Cm(29.7)
            part.left_margin = part.right_margin = Cm(2)
            part.top_margin = part.bottom_margin = Cm(2.2)
        self.width = part.page_width - part.left_margin - part.right_margin
        if not part.footer.is_linked_to_previous:  # the template has its own
            return
        footer = part.footer.paragraphs[0]
        footer.text = " · ".join(filter(None, (self.report.company, self.report.title)))[:110] + "   "
        _field(footer, "PAGE", "1")

    def front(self) -> None:
        from docx.shared import Cm

        report, document = self.report, self.document
        properties = document.core_properties
        properties.title, properties.author, properties.comments = report.title[:250], report.company[:250], ""
        if logo := logo_bytes(report.logo):
            document.add_picture(BytesIO(logo), height=Cm(1.6))
        self._paragraph(report.title, "Title")
        self._paragraph(report.subtitle, "Subtitle")
        self._paragraph(report.byline(), "Normal")
        titles = [section.title for section in report.sections]
        self._contents([f"{i} {title}" for i, title in enumerate([*titles, TITLE], 1)])

    def _contents(self, titles: Sequence[str]) -> None:
        """A field of Word that already has its result: links to the headings. Page numbers are left out, because only
        a program that sets pages knows them; updating the field in Word keeps the links."""
        for i, title in enumerate(titles):
            paragraph = self.document.add_paragraph(style="Contents Entry")
            if i == 0:
                _field_begin(paragraph, 'TOC \\o "1-1" \\n \\h \\z')
            _link(paragraph, f"section_{i + 1}", title)
            if i == len(titles) - 1:
                _field_char(paragraph, "end")

    # --- sections

    def section(self, number: int, title: str, blocks: Sequence[Block]) -> None:
        paragraph = self._paragraph(f"{number} {title}", "Heading 1")
        _bookmark(paragraph, f"section_{number}", number)
        for block in blocks:
            self._block(block)

    def appendix(self, number: int) -> None:
        table = Table(caption="All figures", columns=COLUMNS, rows=figure_rows(self.report))
        self.section(number, TITLE, [table])

    def _block(self, block: Block) -> None:
        match block:
            case Paragraph(text=text):
                self._paragraph(text, "Normal")
            case Bullets(texts=texts):
                for text in texts:
                    self._paragraph(text, "List Bullet")
            case Table():
                self._caption("Table", block.caption)
                self._table(block)
            case Chart() | Picture():
                self._picture(block)

    def _paragraph(self, text: str, style: str) -> Any:
        paragraph = self.document.add_paragraph(text, style=style)
        if is_rtl(text):
            _right_to_left(paragraph)
        return paragraph

    def _picture(self, block: Chart | Picture) -> None:
        self.document.add_picture(BytesIO(drawing_png(self.report, block)), width=self.width)
        picture = self.document.paragraphs[-1]
        picture.paragraph_format.keep_with_next = True
        for drawing in picture._p.xpath(".//wp:docPr"):
            drawing.set("descr", block.caption)
        self._caption("Figure", block.caption)

    def _caption(self, kind: str, text: str) -> None:
        self.counts[kind] += 1
        paragraph = self.document.add_paragraph(style="Caption")
        paragraph.add_run(f"{kind} ")
        _field(paragraph, f"SEQ {kind} \\* ARABIC", str(self.counts[kind]))
        paragraph.add_run(f": {text}")
        paragraph.paragraph_format.keep_with_next = kind == "Table"

    def _table(self, block: Table) -> None:
        from docx.shared import Pt

        rows = self.report.texts(block)
        table = self.document.add_table(rows=len(rows) + 1, cols=len(block.columns))
        table.style = "Table Grid"
        table.autofit = False
        widths = [int(self.width * share) for share in column_shares(block.columns, rows)]
        right = number_columns(block.columns, rows)
        for column, width in zip(table.columns, widths, strict=True):
            column.width = width
        size = Pt(8.5 if len(block.columns) <= 5 else 7.5)
        for i, (row, texts) in enumerate(zip(table.rows, [list(block.columns), *rows], strict=True)):
            bold = i == 0 or (block.total and i == len(rows))
            for cell, text, width, number in zip(row.cells, texts, widths, right, strict=True):
                cell.width = width
                _fill_cell(cell, text, size, bold=bold, number=number, shaded=i == 0)
                cell.paragraphs[0].paragraph_format.keep_with_next = i == 0 or None  # a head is not left alone
            _mark_row(row, "cantSplit")
        _mark_row(table.rows[0], "tblHeader")  # repeated on every page
        self.document.add_paragraph(style="Normal")


# --- parts of the format that python-docx leaves to its users


def _opened(template: str | None) -> Any:
    """An empty document with the styles of a template."""
    from docx import Document

    if template is None:
        return Document()
    try:
        document = Document(BytesIO(template_bytes(template)))
    except NotFound:
        raise
    except Exception as error:  # python-docx raises what zip and XML raise
        raise BadInput(f"the template {template} is no Word document ({error}); give a .docx file") from None
    body = document.element.body
    for child in list(body):
        if not child.tag.endswith("}sectPr"):
            body.remove(child)
    return document


def _ensure_styles(document: Any) -> None:
    """Styles that the report uses and a template may lack; our own look where there is no template."""
    from docx.enum.style import WD_STYLE_TYPE
    from docx.shared import Pt, RGBColor

    names = {style.name for style in document.styles}
    for name in ("Title", "Subtitle", "Heading 1", "List Bullet", "Caption", "Contents Entry"):
        if name not in names:
            style = document.styles.add_style(name, WD_STYLE_TYPE.PARAGRAPH)
            style.base_style = document.styles["Normal"]
    if "Table Grid" not in names:
        document.styles.add_style("Table Grid", WD_STYLE_TYPE.TABLE)
    document.styles["Caption"].font.size = Pt(8.5)
    document.styles["Contents Entry"].paragraph_format.space_after = Pt(1)
    document.styles["Contents Entry"].font.color.rgb = RGBColor.from_string(ACCENT)
    if "Contents Entry" not in names and "Title" in names:
        document.styles["Normal"].font.size = Pt(10)
        document.styles["Caption"].font.color.rgb = RGBColor.from_string(GREY)


def _fill_cell(cell: Any, text: str, size: Any, *, bold: bool, number: bool, shaded: bool) -> None:
    from docx.enum.text import WD_ALIGN_PARAGRAPH
    from docx.oxml import OxmlElement
    from docx.oxml.ns import qn
    from docx.shared import Pt

    paragraph = cell.paragraphs[0]
    run = paragraph.add_run(text)
    run.font.size, run.bold = size, bold or None
    paragraph.paragraph_format.space_after = Pt(1)
    if number:
        paragraph.alignment = WD_ALIGN_PARAGRAPH.RIGHT
    elif is_rtl(text):
        _right_to_left(paragraph)
    if shaded:
        shade = OxmlElement("w:shd")
        for name, value in (("val", "clear"), ("color", "auto"), ("fill", HEAD_FILL)):
            shade.set(qn(f"w:{name}"), value)
        cell._tc.get_or_add_tcPr().append(shade)


def _mark_row(row: Any, name: str) -> None:
    from docx.oxml import OxmlElement
    from docx.oxml.ns import qn

    mark = OxmlElement(f"w:{name}")
    mark.set(qn("w:val"), "true")
    row._tr.get_or_add_trPr().append(mark)


def _right_to_left(paragraph: Any) -> None:
    from docx.oxml import OxmlElement

    properties = paragraph._p.get_or_add_pPr()
    properties.insert_element_before(OxmlElement("w:bidi"), *AFTER_BIDI)
    for run in paragraph.runs:
        run.font.rtl = True


def _field_char(paragraph: Any, kind: str) -> None:
    from docx.oxml import OxmlElement
    from docx.oxml.ns import qn

    mark = OxmlElement("w:fldChar")
    mark.set(qn("w:fldCharType"), kind)
    paragraph.add_run()._r.append(mark)


def _field_begin(paragraph: Any, code: str) -> None:
    from docx.oxml import OxmlElement
    from docx.oxml.ns import qn

    _field_char(paragraph, "begin")
    instruction = OxmlElement("w:instrText")
    instruction.set(qn("xml:space"), "preserve")
    instruction.text = f" {code} "
    paragraph.add_run()._r.append(instruction)
    _field_char(paragraph, "separate")


def _field(paragraph: Any, code: str, result: str) -> None:
    """A field with its result, so that no program has to update it."""
    _field_begin(paragraph, code)
    paragraph.add_run(result)
    _field_char(paragraph, "end")


def _link(paragraph: Any, bookmark: str, text: str) -> None:
    from docx.oxml import OxmlElement
    from docx.oxml.ns import qn

    link = OxmlElement("w:hyperlink")
    link.set(qn("w:anchor"), bookmark)
    link.append(paragraph.add_run(text)._r)
    paragraph._p.append(link)


def _bookmark(paragraph: Any, name: str, number: int) -> None:
    from docx.oxml import OxmlElement
    from docx.oxml.ns import qn

    start, end = OxmlElement("w:bookmarkStart"), OxmlElement("w:bookmarkEnd")
    start.set(qn("w:id"), str(number))
    start.set(qn("w:name"), name)
    end.set(qn("w:id"), str(number))
    run = paragraph.runs[0]._r
    run.addprevious(start)
    run.addnext(end)
