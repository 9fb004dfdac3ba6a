"""The timeline: phases and named checkpoints with their dates."""

from __future__ import annotations

from datetime import date

from armillary.documents.blocks import Cell, Chart, Paragraph, Section, Table
from armillary.documents.facts import PlanFacts
from armillary.documents.figures import Amount, Figures
from armillary.documents.values import clean, serial

PHASES = "Timeline"


def timeline_section(facts: PlanFacts, figures: Figures, today: date) -> Section:
    """Phases one after the other; their days are inputs, the run's follow from the plan."""
    options = facts.options
    figures.put(PHASES, "start_day", "First day", serial(options.first_day(today)), "date", "report.start")
    begin, rows, bars = "start_day", list[list[Cell]](), list[tuple[str, Amount, Amount]]()
    for name, label, key in _phases(facts, figures):
        end = f"({begin}) + {key}"
        begins, ends = figures.calculated(begin, "date"), figures.calculated(end, "date")
        rows.append([label, figures.calculated(key, "days"), begins, ends])
        bars.append((label, figures.calculated(f"({begin}) - start_day", "days"), figures.amount(key)))
        if name == "run":
            rows += _named_checkpoints(facts, figures, begin)
        begin = end
    finish = figures.calculated(begin, "date")
    text = figures.say(
        "From {start_day} the plan is complete on {end}.", end=figures.notation.text(finish.value, "date")
    )
    columns = ("phase", "days", "begins", "ends")
    table = Table(caption="Milestones", columns=columns, rows=rows)
    chart = Chart(
        caption=figures.say("Phases, in days from {start_day}"),
        kind="span",
        categories=[label for label, _, _ in bars],
        series=[("begins after", [at for _, at, _ in bars]), ("days", [days for _, _, days in bars])],
    )
    return Section(key="timeline", title="Timeline", blocks=[Paragraph(text=text), table, chart], points=[text])


def _phases(facts: PlanFacts, figures: Figures) -> list[tuple[str, str, str]]:
    """(name, label, figure of its days)."""
    wanted = {
        "procurement": ("Procurement and installation", facts.recipe.cost.owned),
        "data": ("Data preparation", facts.training is not None),
        "acceptance": ("Acceptance: burn-in, ceilings, canary run", True),
        "run": ("Training run", facts.training is not None),
        "evaluation": ("Evaluation", facts.training is not None),
        "rollout": ("Roll-out of the service", facts.serving is not None),
    }
    phases = []
    for name, (label, applies) in wanted.items():
        if not applies:
            continue
        key = "run_days" if name == "run" else f"{name}_days"
        if key not in figures:
            source = f"report.days.{name}" if name in facts.options.days else "assumed; report.days"
            figures.put(PHASES, key, f"{label}, days", facts.options.phase_days(name), "days", source)
        phases.append((name, label, key))
    return phases


def _named_checkpoints(facts: PlanFacts, figures: Figures, begin: str) -> list[list[Cell]]:
    rows: list[list[Cell]] = []
    for name, step in sorted(facts.recipe.train.milestones.items(), key=lambda item: item[1]):
        days = f"run_days * {step} / steps"
        at: Amount = figures.calculated(f"({begin}) + {days}", "date")
        rows.append([f"checkpoint “{clean(name)}” after step {step:,}", figures.calculated(days, "days"), at, at])
    return rows
