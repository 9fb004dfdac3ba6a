"""Risks that follow from the figures of a plan: what is near a limit, or rests on something unmeasured."""

from __future__ import annotations

from dataclasses import dataclass

from armillary.documents.blocks import Paragraph, Section, Table
from armillary.documents.facts import PlanFacts
from armillary.documents.figures import Figures
from armillary.documents.values import clean

TIGHT_MEMORY, LOW_GOODPUT, HIGH_COMM, HIGH_LOAD, TIGHT_SLO = 0.1, 0.95, 0.15, 0.85, 0.9
"""below or above these shares a risk is listed: free memory, goodput, exposed communication, load of the replicas, use
of an objective. Judgements, not measurements"""


@dataclass(frozen=True, kw_only=True)
class Risk:
    """One risk, with the figure that shows it."""

    title: str
    evidence: str
    likelihood: str
    impact: str
    mitigation: str


def risks_of(facts: PlanFacts, figures: Figures) -> list[Risk]:
    """What in this plan is near a limit or rests on an unmeasured figure."""
    return [*_training_risks(facts, figures), *_serving_risks(facts, figures), *_money_risks(facts, figures)]


def _training_risks(facts: PlanFacts, figures: Figures) -> list[Risk]:
    plan, risks = facts.training, list[Risk]()
    if plan is None:
        return risks
    if not plan.fits:
        risks.append(_risk("The model does not fit", plan.shortage, "certain", "blocks the plan", plan.remedy))
    elif "memory_free" in figures and figures["memory_free"].value < TIGHT_MEMORY:
        evidence = figures.say("{memory_free} of {memory_limit} stay free")
        risks.append(_risk("Out of memory", evidence, "medium", "run stops", "recompute more, or shard more"))
    if figures["goodput"].value < LOW_GOODPUT:
        evidence = figures.say("{goodput} goodput, a failure every {mtbf_all_s}")
        fix = "faster checkpoints, copies in peers’ memory, spare nodes"
        risks.append(_risk("Time lost to failures", evidence, "high", "longer and dearer run", fix))
    share = float(plan.prediction.time.exposed[0] / plan.prediction.time.total[0])
    if share > HIGH_COMM:
        evidence = f"{share * 100:.0f} % of a step waits for communication"
        risks.append(
            _risk("Network-bound step", evidence, "high", "lower MFU", "a layout with less traffic between nodes")
        )
    if not facts.confidence:
        source = plan.prediction.case.curves.source
        evidence = f"ceilings: {source}; no run on this device is on record"
        fix = "measure the ceilings (armillary bench) and a short run before committing"
        risks.append(_risk("Prediction not verified", evidence, "medium", "duration and cost off", fix))
    return risks


def _serving_risks(facts: PlanFacts, figures: Figures) -> list[Risk]:
    plan, risks = facts.serving, list[Risk]()
    if plan is None:
        return risks
    if plan.chosen.devices > plan.request.cluster.num_devices:
        evidence = f"{plan.chosen.devices} needed, {plan.request.cluster.num_devices} available"
        risks.append(
            _risk("Too few devices", evidence, "certain", "objectives missed", "add devices or relax the SLOs")
        )
    if figures["replica_load"].value > HIGH_LOAD:
        evidence = figures.say("replicas are loaded to {replica_load}")
        risks.append(
            _risk("No headroom for peaks", evidence, "medium", "latency above SLO", "one more replica, autoscaling")
        )
    if plan.capacity.replicas == 1:
        evidence = "one replica serves all traffic"
        risks.append(_risk("Single point of failure", evidence, "medium", "outage", "a second replica in another node"))
    for figure in list(figures):
        if figure.key.startswith("slo_"):
            used = figures[figure.key.removeprefix("slo_")].value / figure.value
            if used > TIGHT_SLO:
                evidence = f"{figure.label.removeprefix('Objective: ')} uses {used * 100:.0f} % of its objective"
                risks.append(
                    _risk(
                        "SLO nearly used up", evidence, "medium", "SLO missed", "more replicas, smaller prompt chunks"
                    )
                )
    if plan.chosen.dtypes.weights in ("int4", "fp4"):
        evidence = f"{plan.chosen.dtypes.weights} weights"
        risks.append(
            _risk(
                "Quality of quantised weights", evidence, "medium", "worse answers", "evaluate against 16-bit weights"
            )
        )
    return risks


def _money_risks(facts: PlanFacts, figures: Figures) -> list[Risk]:
    risks = []
    if "budget_left" in figures and figures["budget_left"].value < 0:
        over = figures.notation.text(-figures["budget_left"].value, "money", short=True)
        risks.append(
            _risk("Over budget", f"{over} above the budget", "certain", "approval", "fewer tokens, or a cheaper offer")
        )
    if "spot_hour" in figures and facts.recipe.cost.spot:
        evidence = figures.say("spot machines, {spot_goodput} useful time")
        risks.append(
            _risk("Interruptions of spot machines", evidence, "high", "longer run", "reserve part of the capacity")
        )
    if "capex" in figures and "reported" in figures["capex"].source:
        risks.append(
            _risk(
                "Purchase price is reported, not quoted",
                figures.text("capex"),
                "medium",
                "capex off",
                "ask for a quote",
            )
        )
    return risks


def _risk(title: str, evidence: str, likelihood: str, impact: str, mitigation: str) -> Risk:
    return Risk(
        title=title, evidence=clean(evidence), likelihood=likelihood, impact=impact, mitigation=clean(mitigation)
    )


def risks_section(risks: list[Risk]) -> Section:
    columns = ("risk", "evidence", "likelihood", "impact", "mitigation")
    rows = [[risk.title, risk.evidence, risk.likelihood, risk.impact, risk.mitigation] for risk in risks]
    text = (
        f"{len(risks)} risks follow from the figures of this plan."
        if len(risks) > 1
        else "One risk follows from the figures of this plan."
        if risks
        else "No figure of this plan is near a limit: memory, goodput, network and budget have a margin."
    )
    table = [Table(caption="Risks", columns=columns, rows=rows)] if rows else []
    return Section(key="risks", title="Risks", blocks=[Paragraph(text=text), *table], points=[text])
