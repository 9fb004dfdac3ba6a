"""Reports for tests: of a real plan, and one made by hand that is as awkward as names can be."""

from __future__ import annotations

from datetime import date
from pathlib import Path

from armillary.documents.blocks import Bullets, Chart, Paragraph, Picture, Report, Section, Table
from armillary.documents.contents.topology import topology
from armillary.documents.facts import PlanFacts, gather
from armillary.documents.figures import Amount, Figures
from armillary.spec import catalogue
from armillary.spec.recipe import recipe_from_dict
from armillary.store.home import Home

RECIPE = {
    "model": {"name": "llama-3-8b"},
    "hardware": {"on": "h100x16"},
    "layout": {"dp": 16, "zero": 3, "recompute": "full"},
    "train": {"sequence": 8192, "batch_tokens": 1_048_576, "steps": 20_000, "milestones": {"half": 10_000}},
    "traffic": {"requests_per_s": 60.0, "tokens_in": 512, "tokens_out": 128},
    "objective": {"ttft_p99_s": 1.0, "itl_p99_s": 0.1},
    "cost": {"staff_usd_per_year": 50_000.0},
    "report": {"company": "Example & Sons", "start": "2026-12-01", "budget_usd": 500_000.0},
}
AWKWARD = (
    '=HYPERLINK("http://x","y")',
    "+1+cmd|' /C calc'!A0",
    "@SUM(A1)",
    "-2+3",
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    '#panic("typst")',
    '#read("/etc/hostname")',
    "| pipe | [link](http://x) **bold** `code` |",
    "{braces} {0} %s \\n \\",
    "نموذج لغوي كبير للاختبار",
    "דגם שפה גדול",
    "大规模语言模型的基础设施计划和成本估算",
    "tab\tline\nend\x00\x0b\u202ereversed\ufeff",
    "x" * 400,
    "a-very-long-name/" * 20,
)


def facts(home: Home, *overrides: str) -> PlanFacts:
    """The plans of RECIPE, for training and serving."""
    recipe = recipe_from_dict(RECIPE, overrides)
    return gather(recipe, recipe.model_config(), recipe.cluster(), home, ("train", "serve"))


def awkward_report(rows: int = 200) -> Report:
    """Hostile names wherever a name can be, and a table of many rows."""
    figures = Figures()
    for i, name in enumerate(AWKWARD):
        figures.put(name, f"figure_{i}", name, 10.0 + i, "money", name)
    figures.derive("Totals", "total", "Total", "money", " + ".join(f"figure_{i}" for i in range(len(AWKWARD))))
    table = Table(
        caption=AWKWARD[4],
        columns=("name", AWKWARD[0], "amount", AWKWARD[10]),
        rows=[
            [f"{i} {AWKWARD[i % len(AWKWARD)]}", AWKWARD[-i % len(AWKWARD)], figures.amount(f"figure_{i % 16}"), "–"]
            for i in range(rows)
        ],
    )
    values = [Amount(value=float(i + 1), unit="s") for i in range(len(AWKWARD))]
    sections = [
        Section(key="summary", title="Summary " + AWKWARD[4], blocks=[Bullets(texts=AWKWARD), table], points=AWKWARD),
        Section(
            key="training",
            title=AWKWARD[12],
            blocks=[
                *(Paragraph(text=name) for name in AWKWARD),
                Chart(caption=AWKWARD[5], kind="bar", categories=AWKWARD, series=[(AWKWARD[6], values)]),
                Picture(caption=AWKWARD[7], diagram=topology(catalogue.cluster("h100x64"), AWKWARD[10])),
            ],
            points=[AWKWARD[10], AWKWARD[15]],
        ),
    ]
    title = AWKWARD[4] + AWKWARD[12] + AWKWARD[10]
    return Report(
        title=title,
        subtitle=AWKWARD[5],
        company=AWKWARD[0],
        created=date(2026, 11, 18),
        figures=figures,
        sections=sections,
    )


def written(report: Report, formats: tuple[str, ...], folder: Path) -> dict[str, Path]:
    """Format -> its file."""
    from armillary.documents.write import write_documents

    return dict(zip(formats, write_documents(report, formats, folder), strict=True))
