"""`plan --for serve`: the cheapest way to serve a traffic within its objectives, or the recipe's own layout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from armillary.cli.output import Output
from armillary.planning.cost.cost import offers
from armillary.planning.cost.cost_report import OFFER_COLUMNS, buying_rows, offer_cells
from armillary.planning.serving.serving_plan import ServingPlan
from armillary.planning.serving.serving_report import CHOICE_COLUMNS, choice_cells, plan_rows
from armillary.planning.serving.serving_report import explain as explain_terms
from armillary.spec.arithmetic.params import parameters
from armillary.spec.toml.fields import to_plain
from armillary.units import count_text

if TYPE_CHECKING:  # only `--on any` ranks nodes
    from armillary.planning.node_ranking import RankedServing

_SHOWN, _SHOWN_SEARCHED, _SHOWN_NODES = 5, 12, 20
"""ways to serve that are listed"""


def say_serving(out: Output, plan: ServingPlan) -> None:
    """The plan as a page, then the best other ways."""
    _head(out, plan)
    out.fields("", [*plan_rows(plan.request, plan.chosen, plan.pools), *(("note", note) for note in plan.notes())])
    if len(plan.tried) > 1:
        out.say()
        _say_ways(out, plan, _SHOWN)
    out.result(plan.plain(), quiet=str(plan.chosen.devices))


def say_serving_search(out: Output, plan: ServingPlan) -> None:
    """Every way that was tried, the cheapest that does first, then what the others lack."""
    _head(out, plan)
    _say_ways(out, plan, _SHOWN_SEARCHED)
    for choice in [choice for choice in plan.tried if choice.reason][:_SHOWN]:
        out.say(f"not {choice.split.text()} {choice.dtypes.weights}: {choice.reason}")
    out.result(plan.plain(), quiet=plan.chosen.split.text())


def explain_serving(out: Output, plan: ServingPlan) -> None:
    """Every term with its formula and its numbers."""
    terms = explain_terms(plan.request, plan.chosen)
    _head(out, plan)
    cells = [[term.name, term.formula, term.numbers, term.value] for term in terms]
    out.table("", ["term", "formula", "numbers", "result"], cells)
    if plan.chosen.cost is not None:
        cost, cluster = plan.request.cost, plan.request.cluster
        rows = [offer_cells(offer) for offer in offers(cost, cluster, plan.chosen.devices)]
        out.table("\nprice per device and hour", OFFER_COLUMNS, rows)
        out.fields("", buying_rows(cost, cluster))
    out.result(terms, quiet=[f"{term.name} {term.value}" for term in terms])


def say_serving_ranking(out: Output, ranked: list[RankedServing]) -> None:
    """The catalogue's nodes, the cheapest token first, then why some will not do."""
    good = [node for node in ranked if node.best is not None]
    cells = [_node_cells(node, choice_cells(node.best)) for node in good if node.best]
    out.table("", ["node", "replica", "devices", "TTFT p99", "ITL p99", "$/M tokens", "software"], cells[:_SHOWN_NODES])
    refused = [node for node in ranked if node.best is None]
    for node in refused[:_SHOWN]:
        out.say(f"not {node.node.name}: {node.reason}")
    out.result([_node_answer(node) for node in ranked], quiet=[node.node.name for node in good])


def _node_cells(node: RankedServing, cells: list[str]) -> list[object]:
    split, weights, _, devices, _, ttft, itl, dollars = cells
    return [node.node.name, f"{split} {weights}", devices, ttft, itl, dollars, ", ".join(node.software[:2])]


def _node_answer(node: RankedServing) -> dict[str, Any]:
    chosen = node.best
    return {
        "node": node.node.name,
        "meets": chosen is not None,
        "replica": to_plain(chosen.split) if chosen else None,
        "formats": to_plain(chosen.dtypes) if chosen else None,
        "predicted": chosen.predicted() if chosen else {},
        "software": list(node.software),
        "reason": node.reason or None,
    }


def _head(out: Output, plan: ServingPlan) -> None:
    asked, traffic = plan.request, plan.request.traffic
    out.say(
        f"{asked.config.name} on {asked.cluster.text()} · {count_text(parameters(asked.config).total)} parameters"
        f" · {traffic.text()}"
    )


def _say_ways(out: Output, plan: ServingPlan, shown: int) -> None:
    good = [choice for choice in plan.tried if choice.capacity]
    out.table("", CHOICE_COLUMNS, [choice_cells(choice) for choice in good[:shown]])
    refused = len(plan.tried) - len(good)
    out.say(f"{len(good)} of {len(plan.tried)} ways meet the objectives" + (f"; {refused} do not" if refused else ""))
