"""A disaggregated fleet beside as many replicas that do both: the same requests on each, and which is better.

Replicas that do both can trade the TTFT for the ITL (serve.prefill_slowdown), so where the recipe leaves that open they
are simulated with several limits, and those with the highest goodput count.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from armillary.engine.scheduler.settings import STREAMED_SLOWDOWN
from armillary.planning.serving.deployment_options import TRIED_SLOWDOWNS
from armillary.planning.serving.disaggregation import verdict
from armillary.planning.simulation.fleet_outcome import FleetOutcome
from armillary.units import seconds_text

_SAME = 0.01
"""difference of two goodputs that says nothing"""


@dataclass(frozen=True)
class AgainstColocated:
    """The outcome with two pools, and that of the same replicas without."""

    disaggregated: FleetOutcome
    colocated: FleetOutcome

    @property
    def goodputs(self) -> tuple[float, float]:
        """Requests per second that met every objective."""
        return _goodput(self.disaggregated), _goodput(self.colocated)

    @property
    def verdict(self) -> str:
        ours, theirs = self.goodputs
        gain = ours - theirs if abs(ours - theirs) > _SAME * theirs else 0.0
        change = f"goodput {ours:.3g} requests/s instead of {theirs:.3g}" if gain else f"goodput {ours:.3g} requests/s"
        return verdict(gain, change, self.disaggregated.gauges, self.colocated.gauges)

    @property
    def slowdown_text(self) -> str:
        """serve.prefill_slowdown of the replicas that do both."""
        slowdown = self.colocated.case.system.settings.prefill_slowdown
        return f"{STREAMED_SLOWDOWN:g} (default)" if slowdown is None else f"{slowdown:g}"

    def rows(self) -> list[tuple[str, str, str]]:
        """Figure, with pools, without."""
        pools, fleet = self.disaggregated.case.fleet, self.colocated.case.fleet
        rows = [
            ("serve.prefill_slowdown", "–", self.slowdown_text),
            (
                "replicas",
                f"{pools.prefill_replicas} prefill + {pools.replicas} decode",
                f"{fleet.replicas}",
            ),
        ]
        for name, key in (("ITL", "itl"), ("TTFT", "ttft")):
            for percent in (50, 99):
                times = [each.gauges.get(f"{key}_p{percent}_s") for each in (self.disaggregated, self.colocated)]
                rows.append((f"{name} p{percent}", _text(times[0]), _text(times[1])))
        for percent in (50, 99) if self.disaggregated.long_ttfts else ():
            times = [each.long_ttfts.get(percent) for each in (self.disaggregated, self.colocated)]
            rows.append((f"TTFT p{percent}, long prompts", _text(times[0]), _text(times[1])))
        ours, theirs = self.goodputs
        return [
            *rows,
            ("goodput", f"{ours:.3g} requests/s", f"{theirs:.3g} requests/s"),
            ("objectives met", f"{self.disaggregated.slo_fraction:.2%}", f"{self.colocated.slo_fraction:.2%}"),
        ]


def against_colocated(disaggregated: FleetOutcome, seed: int = 0) -> AgainstColocated:
    """Simulates the same replicas without pools."""
    case, fleet = disaggregated.case, disaggregated.case.fleet
    fleet = replace(fleet, replicas=fleet.replicas + fleet.prefill_replicas, prefill_replicas=0)
    settings = case.system.settings
    tried = [settings]
    if case.objective.itl_p99_s is not None and settings.prefill_slowdown is None:
        tried += [replace(settings, prefill_slowdown=slowdown) for slowdown in TRIED_SLOWDOWNS]
    cases = (replace(case, fleet=fleet, system=replace(case.system, settings=each)) for each in tried)
    outcomes = [FleetOutcome(each, each.run(seed=seed)) for each in cases]
    return AgainstColocated(disaggregated, max(outcomes, key=_goodput))


def _text(seconds: float | None) -> str:
    """Completions of a single token have no ITL."""
    return "–" if seconds is None else seconds_text(seconds)


def _goodput(outcome: FleetOutcome) -> float:
    return outcome.gauges.get("goodput_requests_per_s", 0.0)
