"""The layout of one engine on a given number of devices: tp × pp for the traffic of the recipe.

Every division is priced as the planner prices a deployment: with pp stages, pp steps of different requests are in
flight.
"""

from dataclasses import replace

from armillary.errors import ArmillaryError, BadLayout
from armillary.planning.serving.deployment_options import DeploymentOption, Request, from_layout
from armillary.spec.layout import Layout
from armillary.spec.layout_rules.case import Case
from armillary.spec.layout_rules.division import tp_holds
from armillary.spec.model import ModelConfig
from armillary.spec.tables.traffic import Objective

_WORTH = 1.2
"""rate from which on more stages are chosen: every request takes longer with them, and the planner's rates are off by
12 % on average (benchmarks/planning_inference.md, 2026-11-18)"""


def engine_layout(request: Request, layout: Layout, devices: int) -> tuple[Layout, str]:
    """(the layout with the fewest stages whose rate is near the highest that meets the objectives, why); where none
    meets them, near the highest rate. BadLayout where the model runs on so many devices in no way."""
    if request.cluster.chip.kind == "cpu":
        return _of_one_cpu(
            request.config, layout, devices
        ), "ranks of one CPU share its cores, so no speed is predicted"
    options, reasons = _priced(request, layout, devices)
    missed = not options
    if missed:
        options, reasons = _priced(replace(request, objective=Objective()), layout, devices)
    if not options:
        raise BadLayout(f"no layout of {request.config.name} on {devices} devices: {reasons[-1]}")
    ranked = sorted(options, key=lambda each: -options[each])
    rates = ", ".join(f"{each.text('tp', 'pp')} {options[each]:,.3g} requests/s" for each in ranked)
    near = [each for each in options if options[each] * _WORTH >= options[ranked[0]]]
    return min(near, key=lambda each: each.pp), rates + ("; none meets the objectives" if missed else "")


def _priced(request: Request, layout: Layout, devices: int) -> tuple[dict[Layout, float], list[str]]:
    """(layout -> rate, reasons against the others)."""
    options: dict[Layout, float] = {}
    reasons = []
    for pp in (pp for pp in range(1, devices + 1) if devices % pp == 0):
        candidate = replace(layout, tp=devices // pp, pp=pp, ep=1)
        try:
            options[candidate] = _rate(from_layout(request, candidate))
        except ArmillaryError as error:
            reasons.append(str(error))
    return options, reasons


def _of_one_cpu(config: ModelConfig, layout: Layout, ranks: int) -> Layout:
    """The largest tp that divides the model, and stages for the rest."""
    case = Case(model=config, for_training=False)
    divisions = (replace(layout, tp=ranks // pp, pp=pp, ep=1) for pp in range(1, ranks + 1) if ranks % pp == 0)
    chosen = next((each for each in divisions if tp_holds(each, case) and each.pp <= config.num_layers), None)
    if chosen is None:
        raise BadLayout(f"no layout of {config.name} on {ranks} ranks: heads and layers do not divide; take fewer")
    return chosen


def _rate(option: DeploymentOption) -> float:
    assert option.capacity is not None, "it was priced"
    return option.capacity.highest.requests_per_s
