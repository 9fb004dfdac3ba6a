"""Reading: what was measured, by the gauge names of `spec/gauges.py`; the input of every rule.

Run folders, metrics pages of servers, traces and logs of other programs all become a Reading.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median
from typing import Literal

from armillary.planning.simulation.fitted_step_time import fit_step_cost, least_queries
from armillary.planning.simulation.step_cost import StepCost
from armillary.profiling.profile import Profile
from armillary.spec.plan import Plan
from armillary.store.gauges import Record
from armillary.store.goodput import GoodputAccount

ReadingKind = Literal["training", "serving", "profile"]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One run, server or trace as it was measured."""

    source: str  # what was read: run quiet-otter, a URL, a file
    kind: ReadingKind
    by: str = "armillary"  # armillary, autoscaler, vllm, sglang, tgi, triton, hf-trainer, torchtitan, torch-profiler …
    steps: tuple[Record, ...] = ()  # in their order, without warm-up
    requests: tuple[Record, ...] = ()  # those that ended
    calibration: tuple[Record, ...] = ()  # an engine's steps of many kinds, timed before the first request
    values: Mapping[str, float] = field(default_factory=dict)  # of the whole: percentiles, totals; win over `steps`
    plan: Plan | None = None  # None where someone else ran it
    goodput: GoodputAccount | None = None  # of the whole run, where its events were recorded
    profile: Profile | None = None  # where the time of a step went, where that was recorded
    settings: Mapping[str, str] = field(default_factory=dict)  # what another program's page or log says of its settings
    notes: tuple[str, ...] = ()  # what could not be read, and what was left out

    def get(self, gauge: str) -> float | None:
        """The figure of the whole, or the median over the steps that have it; None where nobody measured it."""
        if gauge in self.values:
            return self.values[gauge]
        values = self.series(gauge)
        return median(values) if values else None

    def series(self, gauge: str) -> list[float]:
        """Of every step, or else of every request, that has it."""
        of_steps = [float(record[gauge]) for record in self.steps if gauge in record]
        return of_steps or [float(record[gauge]) for record in self.requests if gauge in record]

    @cached_property
    def step_cost(self) -> StepCost | None:
        """What an engine's steps took, as a line in their tokens; fitted once, however many rules ask."""
        return fit_step_cost(self.steps, calibration=self.calibration, least=least_queries(self.plan))

    def predicted(self, gauge: str) -> float | None:
        """What the plan said."""
        return self.plan.predicted.get(gauge) if self.plan else None
