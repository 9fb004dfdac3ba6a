"""From a plan to its documents: write all formats, read the figures back from each, change a price in the workbook.

    python examples/plan_to_documents.py             ten seconds; writes plan_to_documents/ with seven documents
    python examples/plan_to_documents.py --quick     Markdown, HTML and Excel only

Needs the extra documents, and openpyxl to read the workbook back. docs/exercises/plan_to_documents.md says what to
look at.
"""

from __future__ import annotations

import re
import time
from html import unescape
from pathlib import Path

from exercise import finish, read_options, table

from armillary.documents.blocks import Report
from armillary.documents.facts import gather
from armillary.documents.plan_report import build_report
from armillary.documents.write import write_documents
from armillary.report.bars import series_bars
from armillary.spec.recipe import recipe_from_dict
from armillary.store.home import Home
from armillary.units import dollars_text, seconds_text

RECIPE = {
    "model": {"name": "llama-3-8b"},
    "hardware": {"on": "h100x16"},
    "train": {"sequence": 8192, "batch_tokens": 2_097_152, "steps": 20_000},
    "traffic": {"requests_per_s": 20.0, "tokens_in": 512, "tokens_out": 128},
    "objective": {"ttft_p99_s": 1.0, "itl_p99_s": 0.1},
    "report": {"company": "Example Ltd", "budget_usd": 60_000.0},
}
SHOWN = ("devices", "step_s", "run_cost", "replicas", "serving_month", "plan_cost")
FACTORS = (0.5, 1.0, 1.5, 2.0)
"""prices of a device-hour, over the plan's"""


def plan() -> Report:
    recipe = recipe_from_dict(RECIPE)
    facts = gather(recipe, recipe.model_config(), recipe.cluster(), Home.default(), ("train", "serve"))
    return build_report(facts)


def text_of(path: Path) -> str:
    """All words of a document, whatever its format."""
    if path.suffix == ".docx":
        import docx

        document = docx.Document(str(path))
        cells = [cell.text for table in document.tables for row in table.rows for cell in row.cells]
        return "\n".join([*(part.text for part in document.paragraphs), *cells])
    if path.suffix == ".pptx":
        from pptx import Presentation

        shapes = [shape for slide in Presentation(str(path)).slides for shape in slide.shapes]
        texts = [shape.text_frame.text for shape in shapes if shape.has_text_frame]
        tables = [shape.table for shape in shapes if shape.has_table]
        return "\n".join([*texts, *(cell.text for each in tables for row in each.rows for cell in row.cells)])
    if path.suffix == ".pdf":
        from pypdf import PdfReader

        return "\n".join(page.extract_text() for page in PdfReader(path).pages)
    return unescape(re.sub(r"<[^>]+>", " ", path.read_text(encoding="utf-8")))


def named_values(path: Path) -> dict[str, float]:
    """Name -> value of the named cells of the workbook."""
    import openpyxl

    book = openpyxl.load_workbook(path, data_only=True)
    found = {}
    for key in SHOWN:
        ((sheet, cell),) = book.defined_names[key].destinations
        found[key] = float(book[sheet][cell].value)
    return found


def where(report: Report, paths: list[Path]) -> list[tuple[str, ...]]:
    """Of each figure: its text, and the formats that have it."""
    texts = {path.suffix[1:]: re.sub(r"\s+", " ", text_of(path)) for path in paths if path.suffix != ".xlsx"}
    workbook = next((named_values(path) for path in paths if path.suffix == ".xlsx"), {})
    rows = []
    for key in SHOWN:
        figure = report.figures[key]
        forms = [report.figures.text(key, short=short) for short in (True, False)]
        text = forms[-1]
        inside = [kind for kind, words in texts.items() if any(form in words for form in forms)]
        if abs(workbook.get(key, 0.0) - figure.value) <= 1e-9 * abs(figure.value):
            inside.append("xlsx")
        rows.append((figure.label, text, ", ".join(inside), figure.formula or figure.source))
    return rows


def price_of(report: Report) -> str:
    """The input that the price of a device-hour is."""
    key = "device_hour"
    while report.figures[key].formula:
        key = report.figures[key].formula
    return key


def main() -> None:
    options = read_options("plan_to_documents", __doc__)
    formats = ("md", "html", "xlsx") if options.quick else ("docx", "xlsx", "pdf", "pptx", "html", "md")
    begin = time.perf_counter()
    report = plan()
    planned_s = time.perf_counter() - begin
    paths = write_documents(report, formats, options.out)
    written_s = time.perf_counter() - begin - planned_s
    took = f"planned in {seconds_text(planned_s)}, {len(paths)} documents in {seconds_text(written_s)}"
    price, hour = price_of(report), report.figures["device_hour"].value
    changed = [(factor, report.figures.recalculated({price: factor * hour})) for factor in FACTORS]
    prices = [
        (
            dollars_text(factor * hour),
            *(dollars_text(values[key]) for key in ("run_cost", "serving_month", "plan_cost")),
        )
        for factor, values in changed
    ]
    text = "\n\n".join(
        [
            took + ":",
            table(("figure", "value", "in", "formula or source"), where(report, paths)),
            "What the workbook shows when the price of a device-hour is changed:",
            table(("device-hour", "run", "serving per month", "first year"), prices),
        ]
    )
    bars = [(f"{factor:g} × the price", [values["run_cost"], values["plan_cost"]]) for factor, values in changed]
    chart = series_bars(bars, ("the run", "the first year"), label="Cost over the price of a device", text=dollars_text)
    finish(options, text, chart, "cost over the price of a device-hour")


if __name__ == "__main__":
    main()
