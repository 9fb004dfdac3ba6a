"""From facts to a report: the figures first, then the sections that are written from them."""

from __future__ import annotations

from armillary.documents.blocks import Report, Section
from armillary.documents.contents import (
    cost_sections,
    front_sections,
    hardware_sections,
    option_sections,
    technical_sections,
)
from armillary.documents.contents.cost_sections import add_totals
from armillary.documents.contents.data_security import security_section
from armillary.documents.contents.risks import risks_of, risks_section
from armillary.documents.contents.serving_figures import add_serving
from armillary.documents.contents.timeline import timeline_section
from armillary.documents.contents.training_figures import add_training
from armillary.documents.facts import PlanFacts
from armillary.documents.figures import Figures
from armillary.documents.values import Notation, clean


def build_report(facts: PlanFacts) -> Report:
    """The report on some facts; formats are written from it."""
    options = facts.options
    notation = Notation(currency=options.currency, per_usd=options.currency_per_usd, date_format=options.date_format)
    figures = Figures(notation=notation)
    sections = _sections(facts, figures)
    return Report(
        title=clean(options.title) or _title(facts),
        subtitle=facts.cluster.text(),
        company=clean(options.company),
        created=facts.created,
        figures=figures,
        sections=sections,
        logo=options.logo,
        templates=options.template,
    )


def _title(facts: PlanFacts) -> str:
    what = [name for name, plan in (("training", facts.training), ("serving", facts.serving)) if plan is not None]
    title = f"Infrastructure plan: {' and '.join(what)} {facts.model_name}"
    return f"{title} (run {clean(facts.run)})" if facts.run else title


def _sections(facts: PlanFacts, figures: Figures) -> list[Section]:
    """In reading order; the summary and the assumptions come first and are written last, from all figures."""
    trained = add_training(figures, facts, facts.training) if facts.training else None
    served = add_serving(figures, facts.serving) if facts.serving else None
    add_totals(figures, facts)
    risks = risks_of(facts, figures)
    timeline = timeline_section(facts, figures, facts.created)
    sections = [
        front_sections.summary_section(facts, figures, len(risks)),
        technical_sections.measured_section(facts, figures),
        front_sections.assumptions_section(facts, figures),
        technical_sections.training_section(facts, figures),
        technical_sections.capacity_section(facts, figures),
        hardware_sections.bill_of_materials(facts, figures),
        hardware_sections.topology_section(facts, figures),
        hardware_sections.network_section(facts, figures),
        hardware_sections.storage_section(facts, figures),
        technical_sections.reliability_section(facts, figures),
        technical_sections.operations_section(facts, figures),
        option_sections.elasticity_section(facts, figures),
        cost_sections.cost_section(facts, figures, trained, served),
        cost_sections.sensitivity_section(figures, trained, served),
        option_sections.alternatives_section(facts, figures),
        risks_section(risks),
        timeline,
        security_section(facts, figures),
    ]
    return [section for section in sections if section is not None]
