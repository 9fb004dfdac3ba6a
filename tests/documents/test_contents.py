"""Sections are written from the figures: what they say agrees with the plan, for every kind of plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from armillary.documents.blocks import Bullets, Paragraph, Report, Table
from armillary.documents.facts import PlanFacts, gather, purposes
from armillary.documents.plan_report import build_report
from armillary.errors import BadRecipe
from armillary.planning.training.other_sizes import with_devices
from armillary.planning.training.training_plan import training_plan
from armillary.spec import catalogue
from armillary.spec.recipe import recipe_from_dict
from armillary.spec.tables.report import ReportTable
from armillary.store.home import Home
from tests.documents import made

SECTIONS = (
    "summary assumptions training capacity bill topology network storage reliability operations elasticity cost "
    "sensitivity alternatives risks timeline security"
)


def prose(report: Report, key: str) -> str:
    section = next(section for section in report.sections if section.key == key)
    texts = [block.text for block in section.blocks if isinstance(block, Paragraph)]
    texts += [text for block in section.blocks if isinstance(block, Bullets) for text in block.texts]
    return " ".join(texts)


def cells(report: Report, caption: str) -> list[list[str]]:
    tables = [block for section in report.sections for block in section.blocks if isinstance(block, Table)]
    table = next(table for table in tables if table.caption == caption)
    return [[report.cell_text(cell) for cell in row] for row in table.rows]


def test_a_plan_for_both_has_every_section(plan_report: Report) -> None:
    assert " ".join(section.key for section in plan_report.sections) == SECTIONS
    figures = plan_report.figures
    assert figures.text("plan_cost") in prose(plan_report, "summary")
    assert "within the budget of $500 k" in prose(plan_report, "summary")
    assert figures.text("run_cost") in prose(plan_report, "cost")
    total = cells(plan_report, "Cost of the first year")
    assert sum(float(row[1].lstrip("$").replace(",", "")) for row in total[:-1]) == pytest.approx(
        float(total[-1][1].lstrip("$").replace(",", "")), abs=0.02
    )


def test_a_second_stream_of_requests_counts(tmp_path: Path) -> None:
    recipe = recipe_from_dict(made.RECIPE, ["traffic.long_requests_per_s=2", "traffic.long_tokens_in=4000"])
    facts = gather(recipe, recipe.model_config(), recipe.cluster(), Home.at(tmp_path), ("serve",))
    values = build_report(facts).figures.values
    assert values["requests_per_s"] == 62 and values["tokens_in"] > 512
    assert values["served_per_s"] == pytest.approx(60 * (512 + 128) + 2 * (4000 + 64))


def test_the_timeline_follows_the_plan(plan_report: Report) -> None:
    rows = cells(plan_report, "Milestones")
    assert rows[0][:3] == ["Data preparation", "14.0 days", "2026-12-01"]
    assert [row[2] for row in rows if row[0] == "Evaluation"] == [row[3] for row in rows if row[0] == "Training run"]
    (chart,) = (block for part in plan_report.sections for block in part.blocks if getattr(block, "kind", "") == "span")
    (_, begins), (_, days) = chart.series
    ends = [begin.value + length.value for begin, length in zip(begins, days, strict=True)]
    assert begins[0].value == 0 and [begin.value for begin in begins[1:]] == pytest.approx(ends[:-1])
    half = next(row for row in rows if "half" in row[0])
    assert half[0] == "checkpoint “half” after step 10,000" and rows[2][2] < half[2] < rows[2][3]


def test_a_plan_over_budget_and_at_its_limits_says_so(plan_facts: PlanFacts) -> None:
    facts = plan_facts
    tight = replace(facts.recipe, report=replace(facts.recipe.report, budget_usd=1000.0, data_class="personal"))
    report = build_report(replace(facts, recipe=tight))
    assert "above the budget of $1,000.00" in prose(report, "summary")
    assert "Over budget" in [row[0] for row in cells(report, "Risks")]
    assert "Personal data" in prose(report, "security") and "legal has to name it" in prose(report, "security")
    assert "within the budget" not in prose(report, "cost")


def test_a_device_whose_memory_nobody_knows_has_a_report(plan_facts: PlanFacts) -> None:
    plan = plan_facts.training
    assert plan is not None
    cluster = replace(plan.problem.case.cluster, chip=replace(plan.problem.case.cluster.chip, memory_bytes=None))
    case = replace(plan.problem.case, cluster=cluster)
    problem = replace(plan.problem, case=case)
    unknown = replace(plan, problem=problem, prediction=replace(plan.prediction, case=case))
    report = build_report(replace(plan_facts, training=unknown, cluster=cluster))
    assert "of the fullest device are used." in prose(report, "training") and "memory_limit" not in report.figures


def test_a_service_costs_the_same_in_a_year_and_over_its_years(plan_report: Report) -> None:
    figures = plan_report.figures
    rows = {
        row[0]: row[1:]
        for section in plan_report.sections
        for block in section.blocks
        if isinstance(block, Table) and block.caption == "Total cost of ownership of the service"
        for row in block.rows
    }
    assert rows["on demand"][1].value == pytest.approx(figures["serving_year"].value)
    devices, years = figures["serving_devices"].value, figures["serving_years"].value
    assert rows["owned"][0].value == devices * figures["serving_capex"].value
    assert rows["owned"][2].value == pytest.approx(rows["owned"][0].value + years * rows["owned"][1].value)
    assert cells(plan_report, "Runbook")[0][0] == "a rank crashes"


def test_devices_without_a_price_have_no_cost(plan_facts: PlanFacts) -> None:
    assert plan_facts.training is not None
    unpriced = replace(plan_facts.training, cost=None, price_source="no price of X is known")
    report = build_report(replace(plan_facts, training=unpriced, serving=None))
    assert "run_cost" not in report.figures and "plan_cost" not in report.figures
    assert "No cost can be stated: no price of X is known" in prose(report, "cost")
    assert "sensitivity" not in [section.key for section in report.sections]
    assert "$" not in prose(report, "summary")


def test_spot_and_owned_devices(plan_facts: PlanFacts) -> None:
    assert plan_facts.training is not None
    for override, selected in (("cost.spot=true", "spot_hour"), ("cost.owned=true", "owned_hour")):
        recipe = recipe_from_dict(made.RECIPE, (override,))
        problem = replace(plan_facts.training.problem, recipe=recipe)
        plan = training_plan(problem, plan_facts.training.prediction)
        report = build_report(replace(plan_facts, recipe=recipe, training=plan, serving=None))
        assert report.figures["device_hour"].formula == selected
        assert ("Procurement and installation" in str(cells(report, "Milestones"))) == (selected == "owned_hour")


def test_what_a_recipe_is_for() -> None:
    assert purposes({"model": {}, "train": {}}) == ("train",) == purposes({"model": {}})
    assert purposes({"traffic": {}}) == ("serve",) and purposes({"train": {}, "objective": {}}) == ("train", "serve")


def test_more_and_fewer_devices_of_a_cluster() -> None:
    cluster = catalogue.cluster("h100x64")
    assert with_devices(cluster, 128).text() == "128 × H100 SXM: 8 by NVLink 4, 16 by InfiniBand NDR"
    assert with_devices(cluster, 4).text() == "4 × H100 SXM: 4 by NVLink 4"


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"currency": "euro"}, "report.currency=euro must be a code of three letters"),
        ({"currency": "EUR"}, "needs its rate; try --set report.currency_per_usd"),
        ({"start": "soon"}, "report.start=soon must be a date like 2026-12-01"),
        ({"days": {"sleep": 3}}, "report.days has sleep = 3"),
        ({"date_format": "today"}, "report.date_format=today must be a format of strftime"),
    ],
)
def test_a_bad_report_table_is_refused(values: dict[str, object], says: str) -> None:
    with pytest.raises(BadRecipe, match=says.replace("(", "\\(")):
        ReportTable(**values)  # type: ignore[arg-type]


def test_a_date_beside_a_name_from_right_to_left_keeps_its_order(plan_report: Report) -> None:
    """Year, month and day would change places."""
    assert replace(plan_report, company="ACME").byline() == f"ACME · {plan_report.date_text}"
    assert replace(plan_report, company="חברת מחשוב").byline() == f"חברת מחשוב · \u200e{plan_report.date_text}\u200e"
    assert replace(plan_report, company="A" * 200).byline("8 × H100", most=9).startswith("AAAAAAAA… · 8 × H100 · ")
