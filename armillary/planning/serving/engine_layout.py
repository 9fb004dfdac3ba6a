"""The layout of one engine on a given number of devices, for the traffic of the recipe: tp × pp, or for a model with
experts tp × copies of attention (serve.dp_attention).

Every division is priced as the planner prices a deployment: with pp stages, pp steps of different requests are in
flight; copies have a KV cache each, and gather their tokens before the experts.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from armillary.errors import ArmillaryError, BadLayout
from armillary.planning.serving.deployment_options import DeploymentOption, Request, from_layout
from armillary.spec.layout import Layout
from armillary.spec.layout_rules.case import Case
from armillary.spec.layout_rules.division import tp_holds
from armillary.spec.model import ModelConfig
from armillary.spec.tables.traffic import Objective

_WORTH = 1.2
"""rate from which on more stages or copies are chosen: every request takes longer with them, and the planner's rates
are off by 12 % on average (benchmarks/planning_inference.md, 2026-11-18)"""


@dataclass(frozen=True, kw_only=True)
class EngineLayout:
    """How the ranks of one engine divide a model."""

    tp: int
    pp: int = 1
    copies: int = 1
    """of attention"""

    @property
    def parts(self) -> int:
        return self.pp * self.copies

    def text(self) -> str:
        sizes = {"tp": self.tp, "pp": self.pp, "dp_attention": self.copies}
        return " × ".join(f"{name}={size}" for name, size in sizes.items() if size > 1) or "tp=1"

    def expert_groups(self, config: ModelConfig) -> int | None:
        """serve.ep of copies of attention: the most that divides ranks and experts; None where nothing does."""
        moe, ranks = config.moe, self.tp * self.copies
        if moe is None:
            return None
        able = [n for n in _divisors(ranks) if moe.num_experts % n == 0 and moe.ffn % (ranks // n) == 0]
        return max(able, default=None)


def engine_layout(request: Request, layout: Layout, devices: int) -> tuple[EngineLayout, str]:
    """(the layout with the fewest stages or copies whose rate is near the highest that meets the objectives, why);
    where none meets them, near the highest rate. BadLayout where the model runs on so many devices in no way."""
    asked = request.serve.dp_attention
    if request.cluster.chip.kind == "cpu":
        chosen = _of_one_cpu(request.config, devices) if asked == 1 else EngineLayout(tp=devices // asked, copies=asked)
        return chosen, "ranks of one CPU share its cores, so no speed is predicted"
    options, reasons = _priced(request, layout, devices)
    missed = not options
    if missed:
        options, reasons = _priced(replace(request, objective=Objective()), layout, devices)
    if not options:
        raise BadLayout(f"no layout of {request.config.name} on {devices} devices: {reasons[-1]}")
    ranked = sorted(options, key=lambda each: -options[each])
    rates = ", ".join(f"{each.text()} {options[each]:,.3g} requests/s" for each in ranked)
    near = [each for each in ranked if options[each] * _WORTH >= options[ranked[0]]]
    return min(near, key=lambda each: each.parts), rates + ("; none meets the objectives" if missed else "")


def _priced(request: Request, layout: Layout, devices: int) -> tuple[dict[EngineLayout, float], list[str]]:
    """(layout -> rate, reasons against the others)."""
    options: dict[EngineLayout, float] = {}
    reasons = []
    for each in _candidates(request, devices):
        try:
            served = replace(request, serve=replace(request.serve, dp_attention=each.copies))
            options[each] = _rate(from_layout(served, replace(layout, tp=each.tp, pp=each.pp, ep=1)))
        except ArmillaryError as error:
            reasons.append(str(error))
    return options, reasons


def _candidates(request: Request, devices: int) -> Iterator[EngineLayout]:
    asked = request.serve.dp_attention
    if asked > 1:
        yield EngineLayout(tp=devices // asked, copies=asked)
        return
    yield from (EngineLayout(tp=devices // pp, pp=pp) for pp in _divisors(devices))
    for copies in _divisors(devices)[1:]:
        divided = EngineLayout(tp=devices // copies, copies=copies)
        if divided.expert_groups(request.config) is not None:
            yield divided


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _of_one_cpu(config: ModelConfig, ranks: int) -> EngineLayout:
    """The largest tp that divides the model, and stages for the rest."""
    case = Case(model=config, for_training=False)
    able = (pp for pp in _divisors(ranks) if pp <= config.num_layers and tp_holds(Layout(tp=ranks // pp), case))
    stages = next(able, None)
    if stages is None:
        raise BadLayout(f"no layout of {config.name} on {ranks} ranks: heads and layers do not divide; take fewer")
    return EngineLayout(tp=ranks // stages, pp=stages)


def _rate(option: DeploymentOption) -> float:
    assert option.capacity is not None, "it was priced"
    return option.capacity.highest.requests_per_s
