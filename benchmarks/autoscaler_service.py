"""The autoscaler on a replayed up-and-down trace, with a real gateway, server processes and HTTP; see simulator.md.

    python -m benchmarks.autoscaler_service --trace AzureLLMInferenceTrace_conv.csv [--day long] [--seed 200]

`armillary up` runs a recipe whose servers are emulated (serve.emulate: a step sleeps for the time that the planner
predicts for Llama 3 8B on an L4), `armillary load` replays requests of the trace through the gateway, at a rate that
goes up and down. The same day is simulated, with the autoscaler and with an oracle that knows it. A short day has 4.5
minutes and about five replicas that start in 4 s, a long one 20 minutes and a dozen that start in 20 s.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any
from urllib.request import urlopen

from armillary.fleet.autoscale.decision_log import Logged, read_log
from armillary.fleet.autoscale.replica_capacity import Limits
from armillary.planning.simulation.fleet_case import FleetCase, replica_limits
from armillary.spec.tables.fleet import Autoscale
from benchmarks.autoscaler_day import KINDS, Kind, case_of, write_service
from benchmarks.autoscaler_oracle import direction_changes, oracle, slo


def served(kind: Kind, folder: Path, home: Path) -> dict[str, Any]:
    """What `armillary load` saw of the service."""
    armillary = [sys.executable, "-m", "armillary"]
    with (folder / "up.log").open("w") as log:
        up = subprocess.Popen(
            [*armillary, "up", "service.toml", "--port", "18711", "--home", str(home)],
            cwd=folder,
            stdout=log,
            stderr=log,
        )
    try:
        wait_ready("http://127.0.0.1:18711", up)
        load = [*armillary, "load", "http://127.0.0.1:18711", "--recipe", "service.toml", "--json", "--home", str(home)]
        sets = ["--set", f"load.warmup_s={kind.warm_s}", "--duration", str(kind.seconds - kind.warm_s)]
        ran = subprocess.run([*load, *sets], cwd=folder, stdout=subprocess.PIPE, check=True)
    finally:
        up.send_signal(signal.SIGINT)
        up.wait(60)
    return json.loads(ran.stdout)


def wait_ready(url: str, up: subprocess.Popen[bytes]) -> None:
    while True:
        try:
            state = json.load(urlopen(f"{url}/service.json", timeout=1))
            if any(each["state"] == "ready" for each in state["replicas"]):
                return
        except OSError:
            assert up.poll() is None, "the service ended; see up.log"
        time.sleep(0.2)


def replica_seconds(log: Path, begin: float, end: float) -> float:
    """Sum of all replicas, starting ones included, over time: from the autoscaler's own log."""
    lines = [line.signals for line in read_log(log) if isinstance(line, Logged)]
    total = 0.0
    for one, following in pairwise(lines):
        total += max(0.0, min(end, following.now) - max(begin, one.now)) * one.replicas
    return total


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--day", choices=KINDS, default="long")
    parser.add_argument("--minutes", type=float, help="another length")
    parser.add_argument("--low", type=float, help="another rate at its beginning and end")
    parser.add_argument("--peak", type=float, help="another rate in its middle")
    parser.add_argument("--cycles", type=int, help="how often it goes up and down")
    parser.add_argument("--start", type=float, help="seconds that a replica takes to start")
    parser.add_argument("--seed", type=int, default=0, help="other requests")
    parser.add_argument("--target", type=float, default=Autoscale.target)
    parser.add_argument("--simulated", action="store_true", help="leave the real processes out")
    args = parser.parse_args()
    given = {"low": args.low, "peak": args.peak, "cycles": args.cycles, "start_s": args.start}
    given["seconds"] = 60 * args.minutes if args.minutes else None
    kind = replace(KINDS[args.day], **{name: value for name, value in given.items() if value is not None})
    with tempfile.TemporaryDirectory() as name:
        count = write_service(kind, Path(name), args.trace, args.seed, target=args.target)
        judge(kind, Path(name), count, simulated_only=args.simulated)


def judge(kind: Kind, folder: Path, count: int, *, simulated_only: bool) -> None:
    case = case_of(folder)
    limits = replica_limits(case)
    say(f"{count:,} requests in {kind.seconds / 60:.1f} min, {limits.requests_per_s:.2f} requests/s per replica")
    inside = oracle_cost(kind, case, limits, kind.start_s)
    run = case.run(limits=limits)
    turns = direction_changes((each for _, each in run.decisions), case.autoscale.cooldown_s)
    cost = run.replica_s_between(kind.warm_s, kind.seconds)
    say_cost("simulated", slo(case, run, kind.warm_s), cost, inside, turns)
    if not simulated_only:
        judge_processes(kind, folder, case, limits)


def judge_processes(kind: Kind, folder: Path, case: FleetCase, limits: Limits) -> None:
    answer = served(kind, folder, folder / "home")
    (log,) = (folder / "home").glob("**/decisions.jsonl")
    lines = [line for line in read_log(log) if isinstance(line, Logged)]
    print((folder / "up.log").read_text())
    begin = next(line.signals.now for line in lines if line.signals.arrived_per_s)
    seen = answer["runs"][-1]
    turns = direction_changes((line.decision for line in lines), case.autoscale.cooldown_s)
    used = replica_seconds(log, begin + kind.warm_s, begin + kind.seconds)
    starts = [line.started_s for line in lines if line.started_s is not None]
    inside = oracle_cost(kind, case, limits, fmean(starts))
    say_cost("real processes", seen["slo_met_fraction"], used, inside, turns)
    failed, ttft_s = f"{seen['failed']} failed {seen['errors']}", seen["ttft"]["p99_s"]
    say(f"  {seen['requests']} requests, {failed}, TTFT p99 {ttft_s:.2f} s")


def oracle_cost(kind: Kind, case: FleetCase, limits: Limits, start_s: float) -> float:
    """Replica seconds of the oracle, after the warm-up."""
    best, share = oracle(case, limits.requests_per_s, kind.warm_s, start_s=start_s)
    cost = best.replica_s_between(kind.warm_s, kind.seconds)
    met = slo(case, best, kind.warm_s)
    say(f"oracle with starts of {start_s:.1f} s: SLO {met:.2%}, {cost:.0f} replica seconds, at {share:.2f} of capacity")
    return cost


def say_cost(name: str, met: float, replica_s: float, oracle_s: float, turns: int) -> None:
    cost = f"{replica_s:.0f} replica seconds, {replica_s / oracle_s - 1:+.1%} over the oracle"
    say(f"{name}: SLO {met:.2%}, {cost}, {turns} changes of direction within a cooldown at most")


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    main()
