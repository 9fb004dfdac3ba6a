"""The pages of the exercises: what they say was measured keeps what must hold, and has a date, a machine and plots."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.exercise_relations import RELATIONS, number, tables

PAGES = sorted((Path(__file__).parents[2] / "docs" / "exercises").glob("*.md"))


def printed(page: Path) -> str:
    """What a run printed: from the first of its headings on."""
    return page.read_text(encoding="utf-8").partition("## What it printed")[2]


def test_there_are_twelve_and_each_has_relations() -> None:
    names = {page.stem for page in PAGES}
    assert len(names) >= 12 and names - {"resnet50"} == set(RELATIONS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_it_names_date_machine_and_command(page: Path) -> None:
    assert re.search(r"^20\d\d-\d\d-\d\d · .*\n*.*`python ", printed(page), re.MULTILINE), "a run to its end"
    for target in re.findall(r"!\[[^\]]+\]\(([^)]+)\)", printed(page)):
        assert (page.parent / target).is_file(), target


@pytest.mark.parametrize("name", RELATIONS)
def test_what_must_hold_holds(name: str) -> None:
    page = next(page for page in PAGES if page.stem == name)
    RELATIONS[name](tables(printed(page)), True)


def test_the_budgets_of_resnet50_sum_to_100_percent() -> None:
    page = next(page for page in PAGES if page.stem == "resnet50")
    budgets = re.findall(r"step [\d.]+ m?s = (.*)", page.read_text(encoding="utf-8"))
    assert len(budgets) >= 4
    for budget in budgets:
        assert sum(float(share) for share in re.findall(r"(\d+) %", budget)) == pytest.approx(100, abs=2), budget


@pytest.mark.parametrize(
    ("name", "pattern", "wrong"),
    [
        ("zero_memory", r"(ZeRO-3, fp32 .*?)(?:[\d.]+ MB \| ){3}", r"\g<1>900 MB | 900 MB | 900 MB | "),
        ("checkpoint_chaos", r"\| yes \|", "| NO |"),
        ("pipeline_bubbles", r"(\| 32 \| 8.6%) \| [\d.]+%", r"\g<1> | 18.6%"),
        ("plan_to_documents", r"docx, pdf, pptx, html, md, xlsx", "docx, pdf"),
        ("amdahl", r"\+?-?\d+% \| ([\d.]+ × \|.*\n)", r"+40% | \g<1>"),
        ("moe_balance", r"\| ([\d.]+) \| \d+% \|", r"| \g<1> | 100% |"),
    ],
)
def test_a_wrong_figure_is_noticed(name: str, pattern: str, wrong: str) -> None:
    text, count = re.subn(pattern, wrong, printed(next(page for page in PAGES if page.stem == name)), count=1)
    assert count == 1
    with pytest.raises(AssertionError):
        RELATIONS[name](tables(text), True)


def test_quantities_are_read() -> None:
    read = {"85.0 MB / 2 MB": 85e6, "**1.51 ×**": 1.51, "$4,700.75": 4700.75, "1:05": 65.0, "63 % ± 10": 0.63}
    assert {text: number(text) for text in read} == pytest.approx(read)
    assert number("−3%") == pytest.approx(-0.03)
