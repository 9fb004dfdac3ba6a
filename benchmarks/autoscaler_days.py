"""The autoscaler in the simulator on many up-and-down days, each against an oracle that knows it; see simulator.md.

    python -m benchmarks.autoscaler_days --trace AzureLLMInferenceTrace_conv.csv [--tuned 100-107] [--fresh 200-207]

Requests of the trace at a Poisson rate that goes up and down, as in autoscaler_service.py. A day has 4.5 minutes and
about five replicas that start in 4 s (`--long`: 20 minutes and a dozen that start in 20 s). The limits of a replica are
simulated once, with the lengths of another day. The policy was chosen on the tuned days; the fresh ones were drawn
afterwards.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean

from armillary.fleet.autoscale.replica_capacity import Limits
from armillary.planning.simulation.fleet_case import FleetCase, replica_limits
from benchmarks.autoscaler_day import LONG, SHORT, Kind, case_of, write_service
from benchmarks.autoscaler_oracle import direction_changes, oracle, slo

LIMITS_SEED = 1


@dataclass(frozen=True, kw_only=True)
class Judged:
    """One day."""

    seed: int
    met: float
    over: float
    """cost over the oracle's"""
    over_free: float
    """the same over an oracle whose starts take no time and cost nothing"""
    share: float
    """of a replica's capacity at which the oracle runs"""
    turns: int
    """changes of direction within a cooldown, at most"""

    @property
    def holds(self) -> bool:
        return self.met >= 0.99 and self.over <= 0.2 and self.turns <= 1


def day_case(kind: Kind, trace: Path, seed: int) -> FleetCase:
    with tempfile.TemporaryDirectory() as name:
        write_service(kind, Path(name), trace, seed)
        return case_of(Path(name))


def judged(kind: Kind, trace: Path, limits: Limits, seed: int) -> Judged:
    case = day_case(kind, trace, seed)
    capacity, end = limits.requests_per_s, case.arrivals[-1].at_s
    best, share = oracle(case, capacity, kind.warm_s, start_s=kind.start_s)
    free, _ = oracle(case, capacity, kind.warm_s)
    run = case.run(limits=limits)
    cost, paying, not_paying = (each.replica_s_between(kind.warm_s, end) for each in (run, best, free))
    return Judged(
        seed=seed,
        met=slo(case, run, kind.warm_s),
        over=cost / paying - 1,
        over_free=cost / not_paying - 1,
        share=share,
        turns=direction_changes((each for _, each in run.decisions), case.autoscale.cooldown_s),
    )


def report(name: str, found: Iterable[Judged]) -> None:
    """Each day as it is judged, then all of them."""
    days = list[Judged]()
    for each in found:
        days.append(each)
        over = f"{each.over:+.1%} over the oracle's ({each.over_free:+.1%} where its starts are free)"
        print(
            f"{name} {each.seed}: objectives met {each.met:.2%}, cost {over}, which ran at {each.share:.2f} of "
            f"one's capacity; {each.turns} changes of direction per cooldown at most: "
            f"{'holds' if each.holds else 'MISSES'}",
            flush=True,
        )
    print(
        f"{name}: {sum(each.holds for each in days)} of {len(days)} days hold; "
        f"objectives met {fmean(each.met for each in days):.2%} (least {min(each.met for each in days):.2%}), "
        f"cost {fmean(each.over for each in days):+.1%} (most {max(each.over for each in days):+.1%})",
        flush=True,
    )


def seeds_of(text: str) -> range:
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--tuned", type=seeds_of, default=range(100, 108), help="days that the policy was chosen on")
    parser.add_argument("--fresh", type=seeds_of, default=range(200, 208), help="days that it has not seen")
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    kind = LONG if args.long else SHORT
    limits = replica_limits(day_case(kind, args.trace, LIMITS_SEED))
    print(f"{limits.requests_per_s:.2f} requests/s by one replica, {limits.pooled_per_s:.2f} by each of very many")
    with ProcessPoolExecutor(args.processes) as pool:
        for name, seeds in (("tuned", args.tuned), ("fresh", args.fresh)):
            report(name, pool.map(partial(judged, kind, args.trace, limits), seeds))


if __name__ == "__main__":
    main()
