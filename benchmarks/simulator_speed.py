"""How fast `armillary simulate` is, and that larger fleets agree with per-replica curves; see simulator.md.

python benchmarks/simulator_speed.py --trace AzureLLMInferenceTrace_conv.csv [--requests 400] [--replicas 1]
python benchmarks/simulator_speed.py --trace AzureLLMInferenceTrace_conv.csv --replicas 20 --curve

Deployments are simulated at the same time, one per core; each figure is of one process on one core.
"""

from __future__ import annotations

import argparse
import os
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

from armillary.engine.scheduler.settings import Settings
from armillary.planning.simulation.capacity_curve import capacity_curve
from armillary.planning.simulation.curve_fleet import CurveFleet
from armillary.planning.simulation.curve_outcome import CurveOutcome
from armillary.planning.simulation.fleet_case import FleetCase
from armillary.planning.simulation.fleet_outcome import FleetOutcome
from armillary.planning.simulation.fleet_run import FleetRun
from armillary.planning.simulation.replayed_requests import Arrival
from armillary.planning.simulation.simulated_engine import System, simulate
from armillary.planning.simulation.simulated_fleet import SimulatedFleet
from armillary.planning.simulation.step_cost import StepCost
from armillary.serving.load.trace import read_trace
from armillary.spec.tables.fleet import Autoscale, Fleet
from armillary.spec.tables.traffic import Objective, Traffic

COSTS = {
    "8B on an H200": StepCost(base_s=0.0045, prefill_s=2.6e-5, decode_s=2e-5, context_s=3e-8, waits=True),
    "70B on 4 H200": StepCost(base_s=0.014, prefill_s=6e-5, decode_s=6e-5, context_s=6e-8, waits=True),
}
"""step times of about these deployments, by the planner"""
COMPARED = ("ttft_p50_s", "ttft_p99_s", "itl_p50_s", "itl_p99_s", "e2e_p50_s", "e2e_p99_s")
COMPARED += ("tokens_out_per_s", "goodput_requests_per_s", "usd")
SYSTEM = System(settings=Settings(max_model_len=32_768, vocab=100), num_blocks=40_000, streamed=True)


def arrivals_of(trace: Path, rate: float, count: int) -> list[Arrival]:
    """The trace at `rate` requests per second; it is repeated where it is too short."""
    rows = read_trace(trace)
    length = rows[-1].at_s or 1.0
    speed = rate * length / len(rows)
    return [
        Arrival(
            number=i + 1,
            at_s=((rows[i % len(rows)].at_s or 0.0) + i // len(rows) * length) / speed,
            tokens_in=rows[i % len(rows)].tokens_in,
            tokens_out=rows[i % len(rows)].tokens_out,
            limit=rows[i % len(rows)].tokens_out,
        )
        for i in range(count)
    ]


def beside_curve(arrivals: list[Arrival], cost: StepCost, fleet: Fleet, run: FleetRun) -> list[str]:
    """The same fleet computed from a capacity curve, as lines."""
    case = FleetCase(
        system=SYSTEM,
        cost=cost,
        arrivals=arrivals,
        fleet=fleet,
        autoscale=Autoscale(),
        objective=Objective(ttft_p99_s=2.0),
        traffic=Traffic(),
        usd_per_replica_hour=4.0,
    )
    begin = time.perf_counter()
    curve = capacity_curve(case)
    computed = CurveOutcome(case, CurveFleet(case, curve).run())
    took_s = time.perf_counter() - begin
    lines = [f"  from a curve in {took_s:.1f} s, up to {curve.most_per_s:.1f} requests/s per replica"]
    full = FleetOutcome(case, run)
    for name in COMPARED:
        one, other = full.gauges[name], computed.gauges[name]
        lines.append(f"    {name:24} every replica {one:.4g}  curve {other:.4g}  {other / one - 1:+.1%}")
    return lines


def measured(args: argparse.Namespace, name: str) -> list[str]:
    """One deployment, simulated in this process, as lines."""
    cost, arrivals = COSTS[name], arrivals_of(args.trace, 8.0 * args.replicas, args.requests * args.replicas)
    begin, cpu = time.perf_counter(), time.process_time()
    fleet = Fleet(replicas=args.replicas, policy="least-load")
    run = SimulatedFleet(arrivals, SYSTEM, cost, fleet).run()
    wall, cpu = time.perf_counter() - begin, time.process_time() - cpu
    simulated = run.end_s * args.replicas
    lines = [
        f"{name}: {run.end_s:.0f} s of {args.replicas} replicas at 8 requests/s each in {wall:.1f} s "
        f"(CPU {cpu:.1f} s): {simulated / wall:.0f} × real time per core, {simulated / cpu:.0f} × of CPU time"
    ]
    if args.curve:
        lines += beside_curve(arrivals, cost, fleet, run)
    if args.slow and args.replicas == 1:
        begin = time.perf_counter()
        simulate(arrivals, replace(SYSTEM, prefix=False), cost)
        lines.append(f"  with the whole engine, step by step: {run.end_s / (time.perf_counter() - begin):.0f} ×")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=400, help="per replica")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--only", default="", help="of the deployments, those whose names have this text")
    parser.add_argument("--slow", action="store_true", help="the whole engine, as before stretches were planned, too")
    parser.add_argument("--curve", action="store_true", help="the same from a capacity curve, and the difference")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="deployments at the same time")
    args = parser.parse_args()
    names = [name for name in COSTS if args.only in name]
    with ProcessPoolExecutor(max(1, min(args.processes, len(names)))) as pool:
        for lines in pool.map(partial(measured, args), names):
            print("\n".join(lines))


if __name__ == "__main__":
    main()
