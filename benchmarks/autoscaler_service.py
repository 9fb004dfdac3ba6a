"""The autoscaler on a replayed up-and-down trace, with a real gateway, server processes and HTTP; see simulator.md.

    python -m benchmarks.autoscaler_service --trace AzureLLMInferenceTrace_conv.csv [--minutes 4] [--peak 6]

`armillary up` runs a recipe whose servers are emulated (serve.emulate: a step sleeps for the time that the planner
predicts for Llama 3 8B on an L4), `armillary load` replays requests of the trace through the gateway, at a rate that
goes up and down. The same day is simulated, with the autoscaler and with an oracle that knows it.
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
from math import cos, pi
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any
from urllib.request import urlopen

from armillary.cli.output import Output
from armillary.cli.plan.options import find_cluster, model_config
from armillary.fleet.autoscale.decision_log import Logged, read_log
from armillary.fleet.autoscale.replica_capacity import Limits
from armillary.planning.simulation.fleet_case import FleetCase, fleet_case, replica_limits
from armillary.serving.load.trace import read_trace
from armillary.spec.hf.config import to_hf
from armillary.spec.recipe import Recipe, load_service_recipe, recipe_from_dict
from armillary.spec.tables.fleet import Autoscale
from armillary.store.home import Home
from benchmarks.autoscaler_oracle import direction_changes, oracle, slo

RECIPE = """
[model]
path = "bot"

[hardware]
on = "l4"

[serve]
emulate = true
max_running = 16
max_model_len = 2048

[traffic]
duration_s = {seconds}

[load]
api = "completions"
trace = "day.jsonl"

[objective]
ttft_p99_s = 2.0
itl_p99_s = 0.3

[fleet]
replicas = 2
start_s = {start_s}
policy = "least-load"

[autoscale]
max_replicas = 12
target = {target}
interval_s = 1.0
stable_window_s = 15.0
panic_window_s = 5.0
cooldown_s = {cooldown_s}

[gateway]
retries = 2
"""
WARM_S = 30.0
"""beginning that is left out"""


def write_day(path: Path, trace: Path, seconds: float, low: float, peak: float, cycles: int, seed: int) -> int:
    """Requests of the trace in their order, at a Poisson rate from low to peak and back, `cycles` times; how many."""
    rng, rows, now, lines = Random(seed), iter(read_trace(trace)), 0.0, list[str]()
    while (now := now + rng.expovariate(peak)) < seconds:
        rate = low + (peak - low) * (1 - cos(2 * pi * cycles * now / seconds)) / 2
        if rng.random() < rate / peak:
            row = next(rows)
            lengths = {"input_length": min(row.tokens_in, 1500), "output_length": min(row.tokens_out, 150)}
            lines.append(json.dumps({"timestamp": round(1000 * now), **lengths}))
    path.write_text("\n".join(lines) + "\n")
    return len(lines)


def write_model(folder: Path) -> None:
    """A folder with a config, a tokenizer of a few words, and no weights."""
    from armillary.model.text.train_tokenizer import train_tokenizer

    config = recipe_from_dict({"model": {"name": "llama-3-8b"}}).model_config()
    train_tokenizer(["def main():\n    return 0\n"] * 20, 300).save(folder)
    (folder / "config.json").write_text(json.dumps(to_hf(config)))


def served(folder: Path, home: Path, seconds: float) -> dict[str, Any]:
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
        sets = ["--set", f"load.warmup_s={WARM_S}", "--duration", str(seconds - WARM_S)]
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
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--low", type=float, default=1.0)
    parser.add_argument("--peak", type=float, default=6.0)
    parser.add_argument("--cycles", type=int, default=1)
    parser.add_argument("--start", type=float, default=4.0, help="seconds that a replica takes to start")
    parser.add_argument("--cooldown", type=float, default=15.0)
    parser.add_argument("--seed", type=int, default=0, help="another day")
    parser.add_argument("--target", type=float, default=Autoscale.target)
    parser.add_argument("--simulated", action="store_true", help="leave the real processes out")
    args = parser.parse_args()
    seconds = 60 * args.minutes
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "bot")
        count = write_day(folder / "day.jsonl", args.trace, seconds, args.low, args.peak, args.cycles, args.seed)
        (folder / "service.toml").write_text(
            RECIPE.format(start_s=args.start, cooldown_s=args.cooldown, target=args.target, seconds=seconds)
        )
        judge(folder, count, seconds, simulated_only=args.simulated)


def judge(folder: Path, count: int, seconds: float, *, simulated_only: bool) -> None:
    home = Home.at(folder / "home")
    recipe = recipe_of(folder)
    config = model_config(Output("quiet"), home, recipe)
    case = fleet_case(recipe, config, find_cluster(recipe), home)
    limits = replica_limits(case)
    cooldown_s = case.autoscale.cooldown_s
    say(f"{count:,} requests in {seconds / 60:.0f} min, {limits.requests_per_s:.2f} requests/s per replica")
    inside = oracle_cost(case, limits, seconds, case.fleet.start_s or 0.0)
    run = case.run(limits=limits)
    turns = direction_changes((each for _, each in run.decisions), cooldown_s)
    say_cost("simulated", slo(case, run, WARM_S), run.replica_s_between(WARM_S, seconds), inside, turns)
    if simulated_only:
        return
    answer = served(folder, folder / "home", seconds)
    (log,) = (folder / "home").glob("**/decisions.jsonl")
    lines = [line for line in read_log(log) if isinstance(line, Logged)]
    print((folder / "up.log").read_text())
    begin = next(line.signals.now for line in lines if line.signals.arrived_per_s)
    seen = answer["runs"][-1]
    turns = direction_changes((line.decision for line in lines), cooldown_s)
    used = replica_seconds(log, begin + WARM_S, begin + seconds)
    starts = [line.started_s for line in lines if line.started_s is not None]
    say_cost("real processes", seen["slo_met_fraction"], used, inside, turns)
    inside = oracle_cost(case, limits, seconds, fmean(starts))
    say(f"  {used / inside - 1:+.1%} over an oracle whose starts take as long as the measured ones")
    failed, ttft_s = f"{seen['failed']} failed {seen['errors']}", seen["ttft"]["p99_s"]
    say(f"  {seen['requests']} requests, {failed}, TTFT p99 {ttft_s:.2f} s")


def oracle_cost(case: FleetCase, limits: Limits, seconds: float, start_s: float) -> float:
    """Replica seconds of the oracle, after the warm-up."""
    best, share = oracle(case, limits.requests_per_s, WARM_S, start_s=start_s)
    cost = best.replica_s_between(WARM_S, seconds)
    met = slo(case, best, WARM_S)
    say(f"oracle with starts of {start_s:.1f} s: SLO {met:.2%}, {cost:.0f} replica seconds, at {share:.2f} of capacity")
    return cost


def recipe_of(folder: Path) -> Recipe:
    recipe = load_service_recipe(folder / "service.toml")
    model = replace(recipe.model, path=str(folder / "bot"))
    return replace(recipe, model=model, load=replace(recipe.load, trace=str(folder / "day.jsonl")))


def say_cost(name: str, met: float, replica_s: float, oracle_s: float, turns: int) -> None:
    cost = f"{replica_s:.0f} replica seconds, {replica_s / oracle_s - 1:+.1%} over the oracle"
    say(f"{name}: SLO {met:.2%}, {cost}, {turns} changes of direction within a cooldown at most")


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    main()
