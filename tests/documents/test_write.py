"""Files of a report: all formats have the same figures, and no name can break or take over any of them."""

from __future__ import annotations

import re
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import openpyxl
import pytest
from docx import Document
from pptx import Presentation
from pypdf import PdfReader

from armillary.documents.blocks import Report
from armillary.documents.values import Notation, serial
from armillary.documents.write import FORMATS, read_formats, write_documents
from armillary.documents.writers.pptx import slide_sections
from armillary.errors import BadInput, MissingPart
from armillary.report.page import table
from tests.documents import made

ALL = tuple(FORMATS)
PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c49444154"
    "78da63606060000000040001f61738550000000049454e44ae426082"
)


@pytest.fixture(scope="module")
def files(plan_report: Report, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return made.written(plan_report, ALL, tmp_path_factory.mktemp("plan"))


@pytest.fixture(scope="module")
def awkward(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return made.written(made.awkward_report(), ALL, tmp_path_factory.mktemp("awkward"))


# --- the same figures everywhere


def expected(report: Report) -> dict[str, str]:
    return {figure.key: report.figures.text(figure.key, short=False) for figure in report.figures}


def figures_of_docx(path: Path) -> dict[str, str]:
    table = Document(str(path)).tables[-1]
    return {row.cells[0].text: row.cells[2].text for row in table.rows[1:]}


def figures_of_markdown(path: Path) -> dict[str, str]:
    rows = path.read_text().rpartition("## Appendix")[2].splitlines()[4:]
    cells = [[unescape(re.sub(r"\\(.)", r"\1", cell.strip())) for cell in row.split(" | ")] for row in rows if row]
    return {row[0].lstrip("| "): row[2] for row in cells}


def figures_of_html(path: Path) -> dict[str, str]:
    rows = re.findall(r"<tr>(.*?)</tr>", path.read_text().rpartition("<h2>Appendix")[2])
    cells = [[unescape(cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", row)] for row in rows]
    return {row[0]: row[2] for row in cells if row}


def test_documents_have_the_same_figures(plan_report: Report, files: dict[str, Path]) -> None:
    figures = expected(plan_report)
    assert figures_of_docx(files["docx"]) == figures
    assert figures_of_markdown(files["md"]) == figures
    assert figures_of_html(files["html"]) == figures


def test_the_pdf_has_the_same_figures(plan_report: Report, files: dict[str, Path]) -> None:
    reader = PdfReader(files["pdf"])
    last = len(plan_report.figures.rows) // 60 + 6  # pages of the appendix, at least
    text = re.sub(r"\s|\u200b|\xad", "", "".join(page.extract_text() for page in reader.pages[-last:]))
    appendix = text.rpartition("Allfigures")[2]
    absent = []
    for figure in plan_report.figures:
        row = figure.key + figure.label + plan_report.figures.text(figure.key, short=False)
        if re.sub(r"\s|\u200b", "", row) not in appendix:
            absent.append(row)
    assert absent == []
    assert reader.metadata is not None and reader.metadata.title == plan_report.title


def named(book: Any, key: str) -> Any:
    ((sheet, cell),) = book.defined_names[key].destinations
    return book[sheet][cell]


def test_the_workbook_calculates_the_same_figures(plan_report: Report, files: dict[str, Path]) -> None:
    values, formulas = openpyxl.load_workbook(files["xlsx"], data_only=True), openpyxl.load_workbook(files["xlsx"])
    for figure in plan_report.figures:
        value = named(values, figure.key).value
        value = serial(value.date()) if figure.unit == "date" else value
        assert value == pytest.approx(figure.value, rel=1e-12), figure.key
        assert (named(formulas, figure.key).data_type == "f") == bool(figure.formula), figure.key
    assert sum(len(sheet._charts) for sheet in formulas) >= 5
    live = [cell for sheet in formulas for row in sheet.iter_rows() for cell in row if cell.data_type == "f"]
    assert len(live) > 150 and not any("#" in str(cell.value) for cell in live)


def test_slides_are_few_with_native_charts(plan_report: Report, files: dict[str, Path]) -> None:
    deck = Presentation(str(files["pptx"]))
    assert 8 <= len(deck.slides) <= 12 and len(deck.slides) == len(slide_sections(plan_report)) + 1
    charts = [shape.chart for slide in deck.slides for shape in slide.shapes if shape.has_chart]
    assert len(charts) >= 3
    memory = next(chart for chart in charts if chart.chart_title.text_frame.text.startswith("Memory per device"))
    shown = dict(zip(memory.plots[0].categories, memory.plots[0].series[0].values, strict=True))
    assert shown["Optimizer"] == plan_report.figures["memory_optimizer"].value
    table = next(shape.table for shape in deck.slides[1].shapes if shape.has_table)
    key = {row.cells[0].text: row.cells[1].text for row in list(table.rows)[1:]}
    figures = plan_report.figures
    labels = {figure.label: figures.text(figure.key, short=False) for figure in figures}
    assert len(labels) == len(figures.rows), "each has a label of its own"
    assert len(key) >= 12 and {name: labels[name] for name in key} == key


def test_the_word_document_has_styles_contents_and_captions(plan_report: Report, files: dict[str, Path]) -> None:
    document = Document(str(files["docx"]))
    styles = [paragraph.style.name for paragraph in document.paragraphs if paragraph.style is not None]
    assert styles.count("Heading 1") == len(plan_report.sections) + 1 == styles.count("Contents Entry")
    xml = document.element.xml
    assert 'TOC \\o "1-1"' in xml and xml.count("SEQ Table") == len(document.tables)
    assert xml.count("w:bookmarkStart ") == styles.count("Heading 1") and "w:tblHeader" in xml


# --- names that are no names


def test_no_text_becomes_a_formula(awkward: dict[str, Path]) -> None:
    book = openpyxl.load_workbook(awkward["xlsx"])
    cells = [cell for sheet in book for row in sheet.iter_rows() for cell in row]
    formulas = [str(cell.value) for cell in cells if cell.data_type == "f"]
    assert formulas and all(re.fullmatch(r"=[\w+().]+", text) for text in formulas), "only our own"
    bad = [cell for cell in cells if cell.data_type == "s" and str(cell.value).startswith(("=", "+", "@", "-2"))]
    assert len(bad) > 8 and all(cell.style is not None and cell.quotePrefix for cell in bad)


def test_no_text_becomes_markup(awkward: dict[str, Path]) -> None:
    page = awkward["html"].read_text()
    assert "<script" not in page and "<img" not in page and "&lt;script&gt;" in page
    text = awkward["md"].read_text()
    assert (
        "<script" not in text
        and not re.search(r"[^\\]\]\(http", text)
        and "\\[link\\]" in text
        and "&lt;script&gt;" in text
    )
    assert all(row.count(" | ") == 3 for row in text.rpartition("## Appendix")[2].splitlines()[4:] if row)


def test_awkward_names_are_printed_as_they_are(awkward: dict[str, Path]) -> None:
    document = Document(str(awkward["docx"]))
    texts = [paragraph.text for paragraph in document.paragraphs]
    for name in made.AWKWARD[:13]:
        assert name in texts
    assert "tab line endreversed" in texts and len(document.tables[0].rows) == 201
    xml = document.element.xml
    assert xml.count("<w:bidi/>") > 4 and xml.count("<w:rtl/>") > 4
    pages = PdfReader(awkward["pdf"]).pages
    printed = "".join(page.extract_text() for page in pages[:2]).replace("\u200b", "")
    assert '#panic("typst")' in printed and "<script>alert(1)</script>" in printed and len(pages) > 5
    slides = Presentation(str(awkward["pptx"])).slides
    shown = [shape.text_frame.text for slide in slides for shape in slide.shapes if shape.has_text_frame]
    assert any('#panic("typst")' in text for text in shown)
    table = next(shape.table for slide in slides for shape in slide.shapes if shape.has_table)
    assert len(table.rows) <= 15, "a slide shows some of 200 rows"


def test_file_names_have_no_path_in_them(awkward: dict[str, Path]) -> None:
    for path in awkward.values():
        assert re.fullmatch(r"[\w-]{1,60}\.\w+", path.name)


# --- options


def test_logo_and_templates(tmp_path: Path, plan_report: Report) -> None:
    from dataclasses import replace

    house, deck = Document(), Presentation()
    house.add_paragraph("to be removed")
    house.styles["Heading 1"].font.name = "House Sans"
    house.save(str(tmp_path / "house.docx"))
    deck.slides.add_slide(deck.slide_layouts[0])
    deck.save(str(tmp_path / "house.pptx"))
    (tmp_path / "house.typ").write_text("#json(bytes(sys.inputs.report)).company")
    (tmp_path / "logo.png").write_bytes(PNG)
    templates = tuple(str(tmp_path / f"house.{suffix}") for suffix in ("docx", "pptx", "typ"))
    report = replace(plan_report, sections=plan_report.sections[:1], logo=str(tmp_path / "logo.png"))
    files = made.written(replace(report, templates=templates), ("docx", "pptx", "pdf"), tmp_path / "out")
    document = Document(str(files["docx"]))
    assert "to be removed" not in [paragraph.text for paragraph in document.paragraphs]
    assert document.styles["Heading 1"].font.name == "House Sans" and len(document.inline_shapes) == 1
    assert len(Presentation(str(files["pptx"])).slides) == 2
    assert PdfReader(files["pdf"]).pages[0].extract_text().strip() == "Example & Sons"
    (tmp_path / "house.typ").write_text("#panic()")
    with pytest.raises(BadInput, match="does not compile"):
        write_documents(replace(report, templates=templates), ["pdf"], tmp_path / "out")
    with pytest.raises(BadInput, match="neither PNG nor JPEG"):
        write_documents(replace(report, logo=templates[0]), ["docx"], tmp_path / "bad")
    assert list((tmp_path / "bad").iterdir()) == [], "nothing half written"


def test_a_template_that_is_more_than_styles(tmp_path: Path, plan_report: Report) -> None:
    """A footer of its own, with no plain paragraph, stays; a deck's sections would name slides that are gone."""
    from dataclasses import replace

    from lxml import etree

    house, deck = Document(), Presentation()
    footer = house.sections[0].footer
    footer.add_table(1, 1, 914_400).cell(0, 0).text = "house footer"
    footer._element.remove(footer.paragraphs[0]._p)
    house.save(str(tmp_path / "house.docx"))
    deck.slides.add_slide(deck.slide_layouts[0])
    sections = "http://schemas.microsoft.com/office/powerpoint/2010/main"
    extensions = etree.SubElement(deck.part._element, etree.QName(deck.part._element.nsmap["p"], "extLst"))
    etree.SubElement(etree.SubElement(extensions, "ext"), etree.QName(sections, "sectionLst"))
    deck.save(str(tmp_path / "house.pptx"))
    templates = tuple(str(tmp_path / f"house.{suffix}") for suffix in ("docx", "pptx"))
    report = replace(plan_report, sections=plan_report.sections[:1], templates=templates)
    files = made.written(report, ("docx", "pptx"), tmp_path / "out")
    assert Document(str(files["docx"])).sections[0].footer.tables[0].cell(0, 0).text == "house footer"
    assert b"sectionLst" not in etree.tostring(Presentation(str(files["pptx"])).part._element)


def test_the_direction_of_a_paragraph_is_where_the_schema_has_it(awkward: dict[str, Path]) -> None:
    document = Document(str(awkward["docx"]))
    properties = document.element.xpath("//w:pPr[w:bidi and (w:spacing or w:jc)]")
    assert properties
    for paragraph in properties:
        names = [child.tag.rpartition("}")[2] for child in paragraph]
        assert names.index("bidi") < min(names.index(name) for name in ("spacing", "jc") if name in names)


def test_the_page_has_logo_and_totals_and_aligns_any_currency(tmp_path: Path, plan_report: Report) -> None:
    from dataclasses import replace

    (tmp_path / "logo.png").write_bytes(PNG)
    files = made.written(replace(plan_report, logo=str(tmp_path / "logo.png")), ("html", "md"), tmp_path)
    page = files["html"].read_text()
    assert (
        '<img class="logo" alt="Example &amp; Sons" src="data:image/png;base64,' in page
        and "class='wide total'" in page
    )
    assert "| **First year, all together** | **" in files["md"].read_text()
    for amounts in (["€12.00", "−€3.10"], ["CHF 1,200.00", "CHF 3.10"], ["CN¥5.00", "–"]):
        assert "<td class='number'>" in table(("x",), [[text] for text in amounts])
    assert "class='number'" not in table(("x",), [["RTX 4090"], ["RTX 3090"]])


@pytest.mark.parametrize(
    ("date_format", "excel"),
    [("%d.%m.%Y", 'dd"."mm"."yyyy'), ("%-d %B %Y", 'dd" "mmmm" "yyyy'), ("%j of %Y", "yyyy-mm-dd")],
)
def test_dates_of_the_workbook(date_format: str, excel: str) -> None:
    assert Notation(date_format=date_format).excel("date") == excel


def test_formats_are_named() -> None:
    assert read_formats("PDF, .docx,pdf") == ["pdf", "docx"]
    with pytest.raises(BadInput, match="no format 'doc'; did you mean docx"):
        read_formats("doc")


def test_without_the_extra_one_line_says_what_to_install(
    plan_report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    for module, name in (("docx", "docx"), ("pptx", "pptx"), ("xlsxwriter", "xlsx")):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(MissingPart, match=r"pip install 'armillary\[documents\]'"):
            write_documents(plan_report, [name], tmp_path)


def test_a_long_title_of_slides_is_set_smaller(plan_report: Report, tmp_path: Path) -> None:
    """It would cover the line below it."""
    sizes = []
    for title in ("A plan", "訓練" * 30):
        path = made.written(replace(plan_report, title=title), ("pptx",), tmp_path / str(len(title)))["pptx"]
        boxes = [shape.text_frame for shape in Presentation(str(path)).slides[0].shapes if shape.has_text_frame]
        sizes += [box.paragraphs[0].runs[0].font.size.pt for box in boxes if box.text == title]
    assert len(sizes) == 2 and sizes[1] < sizes[0]
