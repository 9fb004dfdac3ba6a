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
    from armillary.planning.serving.node_ranking import RankedServing

_SHOWN, _SHOWN_SEARCHED, _SHOWN_NODES = 5, 12, 20
"""ways to serve that are listed"""


def say_serving(out: Output, made: ServingPlan) -> None:
    """The plan as a page, then the best other ways."""
    _head(out, made)
    out.fields("", [*plan_rows(made.request, made.chosen, made.pools), *(("note", note) for note in made.notes())])
    if len(made.tried) > 1:
        out.say()
        _say_ways(out, made, _SHOWN)
    out.result(made.plain(), quiet=str(made.chosen.devices))


def say_serving_search(out: Output, made: ServingPlan) -> None:
    """Every way that was tried, the cheapest that does first, then what the others lack."""
    _head(out, made)
    _say_ways(out, made, _SHOWN_SEARCHED)
    for one in [one for one in made.tried if one.reason][:_SHOWN]:
        out.say(f"not {one.split.text()} {one.formats.weights}: {one.reason}")
    out.result(made.plain(), quiet=made.chosen.split.text())


def explain_serving(out: Output, made: ServingPlan) -> None:
    """Every term with its formula and its numbers."""
    terms = explain_terms(made.request, made.chosen)
    _head(out, made)
    cells = [[term.name, term.formula, term.numbers, term.value] for term in terms]
    out.table("", ["term", "formula", "numbers", "result"], cells)
    if made.chosen.cost is not None:
        cost, cluster = made.request.cost, made.request.cluster
        rows = [offer_cells(one) for one in offers(cost, cluster, made.chosen.devices)]
        out.table("\nan hour of a device", OFFER_COLUMNS, rows)
        out.fields("", buying_rows(cost, cluster))
    out.result(terms, quiet=[f"{term.name} {term.value}" for term in terms])


def say_serving_ranking(out: Output, ranked: list[RankedServing]) -> None:
    """The catalogue's nodes, the cheapest token first, then why some will not do."""
    good = [one for one in ranked if one.best is not None]
    cells = [_node_cells(one, choice_cells(one.best)) for one in good if one.best]
    out.table("", ["node", "replica", "devices", "TTFT p99", "ITL p99", "$/M tokens", "software"], cells[:_SHOWN_NODES])
    refused = [one for one in ranked if one.best is None]
    for one in refused[:_SHOWN]:
        out.say(f"not {one.node.name}: {one.reason}")
    out.result([_node_answer(one) for one in ranked], quiet=[one.node.name for one in good])


def _node_cells(one: RankedServing, cells: list[str]) -> list[object]:
    split, weights, _, devices, _, ttft, itl, dollars = cells
    return [one.node.name, f"{split} {weights}", devices, ttft, itl, dollars, ", ".join(one.software[:2])]


def _node_answer(one: RankedServing) -> dict[str, Any]:
    chosen = one.best
    return {
        "node": one.node.name,
        "meets": chosen is not None,
        "replica": to_plain(chosen.split) if chosen else None,
        "formats": to_plain(chosen.formats) if chosen else None,
        "predicted": chosen.predicted() if chosen else {},
        "software": list(one.software),
        "reason": one.reason or None,
    }


def _head(out: Output, made: ServingPlan) -> None:
    asked, traffic = made.request, made.request.traffic
    lengths = f"{traffic.tokens_in:,} + {traffic.tokens_out:,} tokens"
    out.say(
        f"{asked.config.name} on {asked.cluster.text()} · {count_text(parameters(asked.config).total)} parameters"
        f" · {traffic.requests_per_s:g} requests/s of {lengths}"
    )


def _say_ways(out: Output, made: ServingPlan, shown: int) -> None:
    good = [one for one in made.tried if one.capacity]
    out.table("", CHOICE_COLUMNS, [choice_cells(one) for one in good[:shown]])
    refused = len(made.tried) - len(good)
    out.say(f"{len(good)} of {len(made.tried)} ways meet the objectives" + (f"; {refused} do not" if refused else ""))
