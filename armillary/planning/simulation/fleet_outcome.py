"""Figures of a simulated fleet: latencies, rates, goodput, cost; the definitions are those of a load test."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from armillary.planning.simulation.fleet_case import FleetCase
from armillary.planning.simulation.fleet_run import FleetRun
from armillary.planning.simulation.request_slo import latencies, met
from armillary.stats import percentile

PERCENTS = (50, 90, 99)
_POINTS = 400


@dataclass(frozen=True)
class FleetOutcome:
    """A case, what happened, and its figures."""

    case: FleetCase
    run: FleetRun

    @cached_property
    def met(self) -> list[bool]:
        """Per served request, whether it met every objective."""
        return [met(served, self.run, self.case.objective) for served in self.run.served]

    @cached_property
    def ttfts(self) -> list[tuple[float, float]]:
        """(TTFT, share of the requests with at most that)."""
        values = sorted(each.first_s - each.arrived_s for each in self.run.served)
        step = max(1, len(values) // _POINTS)
        return [(values[i], (i + 1) / len(values)) for i in range(0, len(values), step)]

    @cached_property
    def long_ttfts(self) -> dict[int, float]:
        """Percent -> TTFT of the second stream's requests; empty where there is none."""
        numbers = {each.number for each in self.case.arrivals if each.is_long}
        values = [each.first_s - each.arrived_s for each in self.run.served if each.number in numbers]
        return {percent: percentile(values, percent) for percent in PERCENTS} if values else {}

    @property
    def started(self) -> int:
        """Replicas, those of the begin included."""
        return len(self.run.lives)

    @property
    def losses(self) -> dict[str, float]:
        """Requests that were lost, or sent twice, by why."""
        run = self.run
        return {"refused": run.refused, "broken": run.broken, "unserved": run.unserved, "retried": run.retried}

    @property
    def requests(self) -> int:
        run = self.run
        return len(run.served) + run.refused + run.broken + run.unserved

    @cached_property
    def slo_fraction(self) -> float:
        """Share of all requests that met every objective; those without an answer did not."""
        return sum(self.met) / self.requests if self.requests else 1.0

    @cached_property
    def gauges(self) -> dict[str, float]:
        """Gauge -> value."""
        return self._latencies() | self._rates() | self._cost()

    def _latencies(self) -> dict[str, float]:
        served, gauges = self.run.served, dict[str, float]()
        columns = {
            "ttft": [each.first_s - each.arrived_s for each in served],
            "tpot": [latencies(each)[1] for each in served if each.tokens_out > 1],
            "e2e": [each.end_s - each.arrived_s for each in served],
            "queue": [each.started_s - each.arrived_s for each in served],
        }
        for name, values in columns.items():
            gauges |= {f"{name}_p{percent}_s": percentile(values, percent) for percent in PERCENTS if values}
        return gauges | self._gaps()

    def _gaps(self) -> dict[str, float]:
        engines = [life.engine for life in self.run.lives if life.engine.gaps]
        if not engines:
            return {}
        gaps = np.concatenate([np.frombuffer(engine.gaps) for engine in engines])
        weights = np.concatenate([np.frombuffer(engine.gap_weights, dtype=np.uint32) for engine in engines])
        order = np.argsort(gaps)
        below = np.cumsum(weights[order], dtype=np.float64)
        at = {percent: int(np.searchsorted(below, below[-1] * percent / 100)) for percent in PERCENTS}
        return {f"itl_p{percent}_s": float(gaps[order[i]]) for percent, i in at.items()}

    def _rates(self) -> dict[str, float]:
        served = self.run.served
        if not served:
            return {}
        seconds = max(1e-9, max(each.end_s for each in served) - self.case.arrivals[0].at_s)
        busy_s = sum(life.engine.busy_s for life in self.run.lives)
        tokens_in = sum(each.tokens_in for each in served)
        return {
            "requests_per_s": len(served) / seconds,
            "tokens_in_per_s": tokens_in / seconds,
            "tokens_out_per_s": sum(each.tokens_out for each in served) / seconds,
            "goodput_requests_per_s": sum(self.met) / seconds,
            "slo_met_fraction": self.slo_fraction,
            "prefix_hit_fraction": sum(each.cached for each in served) / tokens_in,
            "busy_fraction": min(1.0, busy_s / self.run.replica_s) if self.run.replica_s else 0.0,
            "preemptions_total": float(sum(life.engine.scheduler.totals.preempted for life in self.run.lives)),
        }

    def _cost(self) -> dict[str, float]:
        hours = self.run.replica_s / 3600
        gauges = {"replica_hours": hours, "replicas": self.run.replica_s / self.run.end_s if self.run.end_s else 0.0}
        price, out = self.case.usd_per_replica_hour, sum(each.tokens_out for each in self.run.served)
        if price is not None:
            gauges["usd"] = hours * price
            if out:
                gauges["usd_per_million_tokens_out"] = hours * price / out * 1e6
        return gauges

    def plain(self) -> dict[str, Any]:
        """For --json."""
        run = self.run
        return {
            "requests": self.requests,
            **self.losses,
            "simulated_s": run.end_s,
            "steps": sum(life.engine.num_steps for life in run.lives),
            "step_time": self.case.cost.basis,
            "gauges": self.gauges,
            "decisions": [decision.plain() for _, decision in run.decisions if decision.change],
        }
