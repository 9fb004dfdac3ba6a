"""The first sections of a report: executive summary and assumptions."""

from __future__ import annotations

from armillary.documents.blocks import Block, Bullets, Cell, Paragraph, Section, Table
from armillary.documents.facts import PlanFacts
from armillary.documents.figures import Figures
from armillary.documents.values import clean, plural


def summary_section(facts: PlanFacts, figures: Figures, risks: int) -> Section:
    lines = []
    if facts.training is not None:
        lines.append(
            figures.say(
                "Train {model} ({parameters} parameters) on {total_tokens} tokens with {devices} × {chip}: {days} "
                "from the first step to the last, failures included.",
                model=facts.model_name,
                chip=facts.cluster.chip.title,
                days=figures.text("run_days") if figures["run_days"].value >= 1 else figures.text("run_s"),
            )
        )
        lines.append(figures.say("Speed: {tokens_per_s} at {mfu} MFU; {goodput} of the time is useful."))
    if facts.serving is not None:
        lines.append(
            figures.say(
                "Serve {requests_per_s} of {tokens_in} + {tokens_out} tokens on {serving_devices} × {chip}: TTFT "
                "{ttft_p99_s} and inter-token latency {itl_p99_s} at the 99th percentile{verdict}.",
                chip=facts.cluster.chip.title,
                verdict=_slo_verdict(figures),
            )
        )
    lines += _cost_lines(facts, figures)
    if facts.run:
        step = next((row for row in facts.measured if row.gauge == "step_s" and row.error is not None), None)
        if step is not None and step.error is not None:
            lines.append(f"Run {facts.run} was {step.error * 100:+.1f} % off in the step time that was planned.")
    lines.append(
        f"{plural(risks, 'risk')} to decide on or to watch; each is listed with its mitigation."
        if risks
        else "No figure of the plan is at a limit that calls for a decision."
    )
    keys = [key for key in SUMMARY_KEYS if key in figures]
    rows: list[list[Cell]] = [[figures[key].label, figures.amount(key)] for key in keys]
    table = Table(caption="Key figures", columns=("figure", "value"), rows=rows)
    return Section(key="summary", title="Executive summary", blocks=[Bullets(texts=lines), table], points=lines)


SUMMARY_KEYS = (
    "plan_cost",
    "budget",
    "budget_left",
    "run_cost",
    "run_days",
    "devices",
    "total_tokens",
    "mfu",
    "goodput",
    "serving_month",
    "serving_devices",
    "ttft_p99_s",
    "itl_p99_s",
    "served_cost",
)


def _slo_verdict(figures: Figures) -> str:
    limits = [figure.key for figure in figures if figure.key.startswith("slo_")]
    if not limits:
        return ", with no objective set"
    met = all(figures[key.removeprefix("slo_")].value <= figures[key].value for key in limits)
    return ", within every objective" if met else ", which misses an objective"


def _cost_lines(facts: PlanFacts, figures: Figures) -> list[str]:
    if "plan_cost" not in figures:
        return ["No price of these devices is known, so the plan states no cost."]
    text = "Cost of the first year: {plan_cost}"
    if "budget_left" in figures:
        within = figures["budget_left"].value >= 0
        text += ", within the budget of {budget}" if within else ", above the budget of {budget}"
    lines = [figures.say(f"{text}.")]
    prefix = "" if "break_even" in figures else "serving_"
    if f"{prefix}break_even" in figures:
        month = figures[f"{prefix}break_even"].value
        lines.append(
            f"Buying pays off after {month:.0f} months at {figures.text(f'{prefix}utilisation')} use."
            if month
            else f"Buying does not pay off within {figures.text(f'{prefix}years')} at "
            f"{figures.text(f'{prefix}utilisation')} use."
        )
    return lines


def assumptions_section(facts: PlanFacts, figures: Figures) -> Section:
    rows: list[list[Cell]] = [
        [figure.label, figures.amount(figure.key), figure.source]
        for figure in figures
        if not figure.formula and figure.source != "planner" and figure.group not in ("Timeline",)
    ]
    notes = [*facts.notes]
    if facts.training is not None:
        notes += [f"{key}: {value}" for key, value in facts.training.problem.chosen.items()]
        notes += facts.training.notes()
        notes.append(f"Predicted with ceilings from: {facts.training.prediction.case.curves.source}.")
    if facts.serving is not None:
        notes += facts.serving.notes()
    notes.append(f"Confidence: {facts.confidence}." if facts.confidence else _NO_RECORD)
    notes.append("In the workbook throughput per device stays as planned when the number of devices is changed.")
    text = figures.say("All {count} inputs can be changed in the workbook; every total follows.", count=len(rows))
    table = Table(caption="Inputs and their sources", columns=("input", "value", "source"), rows=rows)
    lines = list(dict.fromkeys(clean(note) for note in notes))
    blocks: list[Block] = [Paragraph(text=text), Bullets(texts=lines), table]
    return Section(key="assumptions", title="Assumptions", blocks=blocks, points=lines[:5])


_NO_RECORD = "Confidence: no run on this kind of device has been measured here yet."
