"""Figures of a fleet that was computed from a capacity curve, under the names of a simulated one (fleet_outcome.py)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from armillary.planning.simulation.capacity_curve import capacity_curve
from armillary.planning.simulation.curve_fleet import CurveFleet, CurveRun, mixture
from armillary.planning.simulation.fleet_case import FleetCase
from armillary.planning.simulation.fleet_outcome import PERCENTS, FleetOutcome

_WAITED = ("ttft", "e2e", "queue")
_SHARES = tuple(range(1, 100))


@dataclass(frozen=True)
class CurveOutcome:
    """A case, what happened, and its figures."""

    case: FleetCase
    run: CurveRun

    @property
    def requests(self) -> int:
        return round(sum(part.requests for part in self.run.parts) + self.run.unserved)

    @property
    def started(self) -> int:
        return self.run.started

    @property
    def losses(self) -> dict[str, float]:
        return {"broken": round(self.run.broken), "unserved": round(self.run.unserved)}

    @cached_property
    def ttfts(self) -> list[tuple[float, float]]:
        values = mixture(self.run.parts, "ttft_s", _SHARES, waits=True)
        return [(value, share / 100) for value, share in zip(values, _SHARES, strict=True)]

    @cached_property
    def slo_fraction(self) -> float:
        """Share of all requests that met every objective: of those that waited for capacity, as many as the wait leaves
        within the objective of the TTFT."""
        limit, met = self.case.objective.ttft_p99_s, 0.0
        for part in self.run.parts:
            share = part.point.met
            if part.wait_s and limit is not None:
                share = min(share, float(np.mean(part.point.ttft_s + part.wait_s <= limit)))
            met += part.requests * share
        return max(0.0, met - self.run.broken) / self.requests if self.requests else 1.0

    @cached_property
    def gauges(self) -> dict[str, float]:
        """Gauge -> value."""
        run, case, gauges = self.run, self.case, dict[str, float]()
        for name in ("ttft", "tpot", "e2e", "queue"):
            values = mixture(run.parts, f"{name}_s", PERCENTS, waits=name in _WAITED)
            gauges |= {f"{name}_p{percent}_s": value for percent, value in zip(PERCENTS, values, strict=True)}
        gaps = mixture(run.parts, "gap_s", PERCENTS)
        gauges |= {f"itl_p{percent}_s": value for percent, value in zip(PERCENTS, gaps, strict=True)}
        tokens_in = float(np.mean([arrival.tokens_in for arrival in case.arrivals]))
        tokens_out = float(np.mean([arrival.tokens_out for arrival in case.arrivals]))
        rate = (self.requests - run.unserved) / max(run.end_s, 1e-9)
        hours = run.replica_s / 3600
        gauges |= {
            "requests_per_s": rate,
            "tokens_in_per_s": rate * tokens_in,
            "tokens_out_per_s": rate * tokens_out,
            "goodput_requests_per_s": rate * self.slo_fraction,
            "slo_met_fraction": self.slo_fraction,
            "busy_fraction": float(np.mean([part.point.busy for part in run.parts])) if run.parts else 0.0,
            "replica_hours": hours,
            "replicas": run.replica_s / run.end_s if run.end_s else 0.0,
        }
        price = case.usd_per_replica_hour
        if price is not None:
            million = max(rate * tokens_out * run.end_s, 1e-9) / 1e6
            gauges |= {"usd": hours * price, "usd_per_million_tokens_out": hours * price / million}
        return gauges

    def plain(self) -> dict[str, Any]:
        """For --json."""
        return {
            "requests": self.requests,
            **self.losses,
            "simulated_s": self.run.end_s,
            "step_time": self.case.cost.basis,
            "gauges": self.gauges,
            "decisions": [decision.plain() for _, decision in self.run.decisions if decision.change],
        }


Outcome = FleetOutcome | CurveOutcome


def outcome_of(case: FleetCase) -> Outcome:
    """The case simulated as fleet.simulate says."""
    if case.fleet.simulate == "each" or case.fleet.prefill_replicas:
        return FleetOutcome(case, case.run())
    scaler = case.autoscaler()
    return CurveOutcome(case, CurveFleet(case, capacity_curve(case), autoscaler=scaler).run())
