"""Sections on what else is possible: other numbers of devices, other traffic, other layouts and ways to serve."""

from __future__ import annotations

from armillary.documents.blocks import Block, Bullets, Cell, Paragraph, Section, Table
from armillary.documents.facts import PlanFacts
from armillary.documents.figures import Amount, Figures
from armillary.planning.serving.deployment_options import DeploymentOption
from armillary.planning.serving.serving_report import CHOICE_COLUMNS, choice_cells
from armillary.planning.training.search import why
from armillary.units import bytes_text

SHOWN_OPTIONS = 12


def elasticity_section(facts: PlanFacts, figures: Figures) -> Section | None:
    blocks: list[Block] = []
    if facts.training is not None and facts.resized:
        rows = [_own_row(figures)]
        for other in facts.resized:
            if other.reason:
                rows.append([Amount(value=float(other.devices), unit="count"), "–", "–", "–", other.reason])
            else:
                rows.append(_elastic_row(figures, other.devices, other.step_s, other.goodput))
        columns = ("devices", "step", "duration", "cost of the run", "note")
        blocks.append(
            Paragraph(
                text="Training continues on another number of devices from any checkpoint. The same layout with other "
                "data parallelism, planned again by the planner:"
            )
        )
        blocks.append(Table(caption="Other numbers of devices", columns=columns, rows=rows))
    if facts.serving is not None:
        rows = [_traffic_row(figures, factor) for factor in (0.25, 0.5, 1.0, 2.0, 4.0)]
        blocks.append(Paragraph(text="Replicas and cost follow the traffic; a replica is the smallest step:"))
        columns = ("traffic", "requests/s", "replicas", "devices", "per month")
        blocks.append(Table(caption="Serving at other traffic", columns=columns, rows=rows))
    if not blocks:
        return None
    return Section(key="elasticity", title="Elasticity", blocks=blocks)


def _own_row(figures: Figures) -> list[Cell]:
    cost: Cell = figures.amount("run_cost") if "run_cost" in figures else "–"
    return [figures.amount("devices"), figures.amount("step_s"), figures.amount("run_days"), cost, "the plan"]


def _elastic_row(figures: Figures, devices: int, step_s: float, goodput: float) -> list[Cell]:
    spot = " * spot_goodput" if "device_hour" in figures and figures["device_hour"].formula == "spot_hour" else ""
    run = f"{step_s!r} * steps / ({goodput!r}{spot})"
    cost: Cell = "–"
    if "device_hour" in figures:
        cost = figures.calculated(f"{devices} * {run} / 3600 * device_hour", "money")
    return [
        Amount(value=float(devices), unit="count"),
        Amount(value=step_s, unit="s"),
        figures.calculated(f"{run} / 86400", "days"),
        cost,
        "planned again",
    ]


def _traffic_row(figures: Figures, factor: float) -> list[Cell]:
    rate = f"requests_per_s * {factor!r}"
    replicas = f"max(1, ceil({rate} / replica_rate))"
    cost: Cell = "–"
    if "serving_hour" in figures:
        cost = figures.calculated(f"{replicas} * replica_devices * serving_hour * 730.0", "money")
    return [
        f"× {factor:g}",
        figures.calculated(rate, "requests/s"),
        figures.calculated(replicas, "count"),
        figures.calculated(f"{replicas} * replica_devices", "count"),
        cost,
    ]


def alternatives_section(facts: PlanFacts, figures: Figures) -> Section | None:
    blocks: list[Block] = []
    points: list[str] = []
    if facts.layouts is not None and facts.training is not None:
        text = _layout_verdict(facts, figures)
        points.append(text)
        blocks += [Paragraph(text=text), _layout_table(facts, figures)]
        blocks += [Bullets(texts=lines)] if (lines := why(facts.layouts)) else []
    if facts.serving is not None and len(facts.serving.tried) > 1:
        good = [option for option in facts.serving.tried if option.capacity]
        text = f"{len(good)} of {len(facts.serving.tried)} ways to serve meet the objectives; the cheapest was chosen."
        points.append(text)
        rows = [_option_row(figures, option) for option in good[:SHOWN_OPTIONS]]
        columns = (*CHOICE_COLUMNS[:-1], "per million tokens")
        blocks += [Paragraph(text=text), Table(caption="Ways to serve", columns=columns, rows=rows)]
    if not blocks:
        return None
    return Section(key="alternatives", title="Alternatives considered", blocks=blocks, points=points)


def _option_row(figures: Figures, option: DeploymentOption) -> list[Cell]:
    cost: Cell = "–"
    if option.cost is not None:
        cost = Amount(value=option.cost.million_tokens_usd * figures.notation.per_usd, unit="money/M")
    return [*choice_cells(option)[:-1], cost]


def _layout_verdict(facts: PlanFacts, figures: Figures) -> str:
    assert facts.layouts is not None and facts.training is not None
    searched, plan = facts.layouts, facts.training
    best, planned = float(searched.best.time.total[0]), float(plan.prediction.time.total[0])
    head = f"{searched.num_valid:,} layouts are valid on these devices, {searched.num_fitting:,} fit into memory."
    if planned <= best * 1.001:
        return f"{head} The plan's is the fastest of them."
    cheaper = ""
    if "run_cost" in figures:
        saved = figures["run_cost"].value * (1 - best / planned)
        cheaper = f" and would save {figures.notation.text(saved, 'money', short=True)}"
    return (
        f"{head} The fastest, {searched.best.layout_text()}, is predicted to be {planned / best:.2f} × as fast as the "
        f"plan's{cheaper}; it was not chosen because the recipe fixes the layout."
    )


def _layout_table(facts: PlanFacts, figures: Figures) -> Table:
    assert facts.layouts is not None
    best, rows = facts.layouts.best, list[list[Cell]]()
    for i in range(len(best.layouts)):
        step = float(best.time.total[i])
        cost: Cell = "–"
        if "device_hour" in figures:
            formula = f"{best.layout(i).num_devices} * {step!r} * steps / useful_time / 3600 * device_hour"
            cost = figures.calculated(formula, "money")
        rows.append(
            [
                best.layout_text(i),
                bytes_text(float(best.memory.total[i])),
                Amount(value=step, unit="s"),
                Amount(value=float(best.mfu[i]), unit="share"),
                cost,
            ]
        )
    return Table(caption="Fastest layouts", columns=("layout", "memory", "step", "MFU", "cost of the run"), rows=rows)
