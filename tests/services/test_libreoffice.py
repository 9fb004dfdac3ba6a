"""Documents in LibreOffice: it sets each within its pages, and recalculates the workbook to the planner's cent."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import openpyxl
import pytest

from armillary.documents.facts import PlanFacts
from armillary.documents.plan_report import build_report
from armillary.store.home import Home
from tests.documents import made
from tests.documents.planner_twin import MONEY, planned, random_changes

pytestmark = pytest.mark.services
OFFICE = ("docx", "xlsx", "pptx")


def converted(paths: list[Path], kind: str, out: Path, profile: Path) -> list[Path]:
    """What LibreOffice makes of some files."""
    line = ["soffice", f"-env:UserInstallation={profile.as_uri()}", "--headless", "--convert-to", kind]
    done = subprocess.run([*line, "--outdir", str(out), *map(str, paths)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    made_files = [out / f"{path.stem}.{kind}" for path in paths]
    assert all(path.is_file() for path in made_files), done.stderr
    return made_files


def words_outside(pdf: Path) -> list[str]:
    """Words that reach over the edge of their page."""
    boxes = subprocess.run(["pdftotext", "-bbox", str(pdf), "-"], capture_output=True, text=True, check=True).stdout
    outside = []
    for page in re.findall(r"<page (.*?)</page>", boxes, re.DOTALL):
        width, height = map(float, re.findall(r'(?:width|height)="([\d.]+)"', page)[:2])
        words = re.findall(r'xMin="(.+?)" yMin="(.+?)" xMax="(.+?)" yMax="(.+?)">(.*?)</word>', page)
        assert words or pdf.stem == "xlsx", "no page is empty, but a sheet may have one with a picture"
        for x0, y0, x1, y1, word in words:
            if float(x0) < -1 or float(y0) < -1 or float(x1) > width + 1 or float(y1) > height + 1:
                outside.append(word)
    return outside


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> PlanFacts:
    return made.facts(Home.at(tmp_path_factory.mktemp("home")))


def test_the_workbook_recalculates_to_the_planners_cent(plan: PlanFacts, tmp_path: Path) -> None:
    report = build_report(plan)
    book_path = made.written(report, ("xlsx",), tmp_path)["xlsx"]
    changed = []
    for seed in range(5):
        book = openpyxl.load_workbook(book_path)  # formulas without values: LibreOffice has to calculate
        for key, value in random_changes(report.figures, seed).items():
            ((sheet, cell),) = book.defined_names[key].destinations
            book[sheet][cell].value = value
        changed.append(tmp_path / f"changed{seed}.xlsx")
        book.save(changed[-1])
    for seed, path in enumerate(converted(changed, "xlsx", tmp_path / "out", tmp_path / "profile")):
        book = openpyxl.load_workbook(path, data_only=True)
        changes = random_changes(report.figures, seed)
        expected, followed = planned(plan, report.figures, changes), report.figures.recalculated(changes)
        for key, value in {**followed, **expected}.items():
            ((sheet, cell),) = book.defined_names[key].destinations
            if report.figures[key].unit != "date":
                assert book[sheet][cell].value == pytest.approx(value, rel=1e-9, abs=1e-9), (seed, key)
            if key in MONEY:
                assert round(book[sheet][cell].value, 2) == pytest.approx(round(value, 2), abs=0.0051), (seed, key)
        errors = [cell for sheet in book for row in sheet.iter_rows() for cell in row if cell.data_type == "e"]
        assert errors == []


@pytest.mark.parametrize("kind", ["plan", "awkward"])
def test_every_format_stays_within_its_pages(plan: PlanFacts, tmp_path: Path, kind: str) -> None:
    report = build_report(plan) if kind == "plan" else made.awkward_report()
    files = made.written(report, (*OFFICE, "pdf"), tmp_path)
    short = []
    for suffix in OFFICE:  # LibreOffice is given plain names
        short.append(tmp_path / f"{suffix}.{suffix}")
        files[suffix].rename(short[-1])
    pages = converted(short, "pdf", tmp_path / "out", tmp_path / "profile")
    for path in (*pages, files["pdf"]):
        assert words_outside(path) == [], path
