"""The table of figures: formulas that Python and a spreadsheet share, held to the planner under changed inputs."""

from __future__ import annotations

import pytest

from armillary.documents import formula
from armillary.documents.blocks import Report
from armillary.documents.facts import PlanFacts
from armillary.documents.figures import Figures
from armillary.documents.values import EPOCH, Notation, clean, serial
from tests.documents.planner_twin import planned, random_changes


def test_a_formula_in_python_and_in_a_spreadsheet() -> None:
    text = "where(a > 2, ceil(a / 2) * -b ** 2, max(a, 1e-9))"
    assert formula.names(text) == {"a", "b"}
    assert formula.evaluate(text, {"a": 5, "b": 3}) == -27 and formula.evaluate(text, {"a": 1, "b": 3}) == 1
    assert formula.to_excel(text) == "IF((a>2),(ROUNDUP((a/2),0)*(0-(b^2))),MAX(a,1e-09))"
    assert formula.evaluate(formula.substitute(text, {"a": "b + 2"}), {"b": 3}) == -27
    with pytest.raises(AssertionError, match="a formula has no"):
        formula.evaluate("[__import__('os')]", {})


@pytest.mark.parametrize("seed", range(5))
def test_changed_inputs_give_what_the_planner_gives(plan_facts: PlanFacts, plan_report: Report, seed: int) -> None:
    figures = plan_report.figures
    changes = random_changes(figures, seed)
    followed, expected = figures.recalculated(changes), planned(plan_facts, figures, changes)
    assert {key: followed[key] for key in expected} == pytest.approx(expected, rel=1e-9)
    assert followed["run_cost"] != figures["run_cost"].value


def test_sensitivity_is_what_recalculating_gives(plan_report: Report) -> None:
    figures = plan_report.figures
    for key in ("rent_hour", "device_tokens_per_s", "requests_per_s", "gb_month"):
        amount = figures.scaled("plan_cost", key, 1.2)
        changed = figures.recalculated({key: figures[key].value * 1.2})
        assert amount.value == pytest.approx(changed["plan_cost"], rel=1e-12)
        assert formula.names(amount.formula) <= set(figures.rows)


def test_a_formula_that_contradicts_the_planner_is_refused() -> None:
    figures = Figures()
    figures.put("", "price", "Price", 2.0, "money", "test")
    with pytest.raises(AssertionError, match="planned 5"):
        figures.derive("", "twice", "Twice", "money", "price * 2", planner=5.0)


def test_amounts_in_another_currency() -> None:
    figures = Figures(notation=Notation(currency="EUR", per_usd=0.5, date_format="%d.%m.%Y"))
    figures.put("", "price", "Price", 2_469_134.0, "money", "test")
    figures.derive("", "half", "Half", "money", "price / 2", planner=1_234_567.0)
    assert figures.text("price", short=False) == "€1,234,567.00" and figures.text("price") == "€1.23 M"
    assert figures.text("half", short=False) == "€617,283.50"
    assert figures.notation.text(serial(EPOCH.replace(year=2026, month=12, day=1)), "date") == "01.12.2026"


@pytest.mark.parametrize(
    ("value", "unit", "written"),
    [
        (104_857_600_000, "tokens", "104,857,600,000"),
        (22_500_000_000, "s", "22,500,000,000.000 s"),
        (0.4567, "share", "45.7%"),
        (15_264.99, "money", "$15,264.99"),
        (989e12, "FLOP/s", "989.0 TFLOP/s"),
    ],
)
def test_a_column_is_as_wide_as_the_sheet_writes(value: float, unit: str, written: str) -> None:
    """Too narrow, and a spreadsheet shows ###."""
    assert len(written) <= Notation().excel_length(value, unit) <= len(written) + 1


def test_prose_takes_figures_and_words_as_they_are() -> None:
    figures = Figures()
    figures.put("", "price", "Price", 2.5, "money/h", "test")
    assert figures.say("{name} costs {price}.", name="{price} {0}\n\x00") == "{price} {0} costs $2.50 per hour."
    assert clean("a\u202eb\x07\ud800 \n c") == "ab? c" and clean("abcdef", 4) == "abc…"
