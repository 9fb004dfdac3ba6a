"""The simulator against a real server on the same requests; see simulator.md.

    python benchmarks/simulator_accuracy.py MODEL --trace FILE [--speed 1] [--longest 512] [--seconds 45]

Two servers of MODEL get two parts of a public trace over HTTP. Step times are fitted to the first server's run; the
second run's requests are simulated with them and compared with what its engine measured. On one H200:

    python benchmarks/simulator_accuracy.py QWEN3_0.6B --trace AzureLLMInferenceTrace_conv.csv --speed 4 --device cuda
    python benchmarks/simulator_accuracy.py LLAMA_3_8B --trace AzureLLMInferenceTrace_conv.csv --speed 2 --device cuda
"""

from __future__ import annotations

import argparse
import itertools
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.request import urlopen

from armillary.diagnosis.readings.reading import Reading
from armillary.diagnosis.readings.run_folder import read_run
from armillary.planning.simulation.fleet_case import fleet_case
from armillary.planning.simulation.fleet_outcome import FleetOutcome
from armillary.planning.simulation.replayed_requests import recorded
from armillary.spec.recipe import recipe_from_dict
from armillary.store.home import Home
from armillary.store.runs import list_runs

LIMITS = {"ttft_p50_s": 0.1, "ttft_p99_s": 0.2, "itl_p50_s": 0.1, "itl_p99_s": 0.2, "tokens_out_per_s": 0.05}
"""what must hold: relative errors"""
_PORTS = itertools.count(18_300)


def measured_run(home: Path, args: argparse.Namespace, part: Path) -> None:
    """One server under a part of the trace."""
    port = next(_PORTS)
    armillary = [sys.executable, "-m", "armillary"]
    device = ["--device", args.device] if args.device else []
    more = [text for setting in args.settings for text in ("--set", setting)]
    serve = [*armillary, "serve", args.model, "--port", str(port), "--home", str(home), *device, *more]
    server = subprocess.Popen(serve, stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            try:
                urlopen(f"{url}/ready", timeout=1)
                break
            except OSError:
                assert server.poll() is None, "the server ended"
                time.sleep(0.3)
        sets = (
            f"load.trace={part}",
            f"load.trace_speed={args.speed}",
            f"load.longest={args.longest}",
            "load.warmup_s=2",
        )
        load = [*armillary, "load", url, "--duration", str(args.seconds), "-q"]
        subprocess.run([*load, *(text for each in sets for text in ("--set", each))], check=True)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()


def parts_of(trace: Path, folder: Path, seconds: float) -> list[Path]:
    """Two consecutive parts of a trace, of so many of its seconds each."""
    from armillary.serving.load.trace import read_trace

    rows = read_trace(trace)
    parts = []
    for number in range(2):
        begin = number * seconds
        lines = [
            f'{{"timestamp": {1000 * (row.at_s - begin):.0f}, "input_length": {row.tokens_in}, '
            f'"output_length": {row.tokens_out}}}'
            for row in rows
            if row.at_s is not None and begin <= row.at_s < begin + seconds
        ]
        parts.append(folder / f"part{number}.jsonl")
        parts[-1].write_text("\n".join(lines))
    return parts


def simulated(fitted: Reading, judged: Reading, home: Home) -> FleetOutcome:
    """The judged run's requests with the fitted run's step times."""
    plan, cost = judged.plan, fitted.step_cost
    assert plan is not None and plan.serve is not None and cost is not None, "both are runs of a server"
    recipe = recipe_from_dict({**plan.recipe, "fleet": {"policy": "least-load"}})
    case = fleet_case(
        recipe,
        plan.model,
        plan.cluster,
        home,
        cost=cost,
        kv_tokens=judged.get("kv_capacity_tokens"),
        arrivals=recorded(judged.requests),
    )
    return FleetOutcome(case, case.run())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--speed", type=float, default=1.0)
    parser.add_argument("--longest", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=45.0)
    parser.add_argument("--device", default="")
    parser.add_argument("--set", dest="settings", action="append", default=[])
    parser.add_argument("--home", type=Path, help="where two runs are, the fitted and the judged one")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = args.home or Path(name)
        home = Home.at(folder)
        if not args.home or not list_runs(home):
            folder.mkdir(parents=True, exist_ok=True)
            for part in parts_of(args.trace, folder, (args.seconds + 2) * args.speed):
                measured_run(folder, args, part)
        fitted, judged = (
            read_run(run, home) for run in sorted(list_runs(home), key=lambda run: run.gauges.stat().st_mtime)[-2:]
        )
        outcome = simulated(fitted, judged, home)
    print(f"{len(judged.requests)} requests; step times {outcome.case.cost.basis}")
    for gauge, limit in LIMITS.items():
        real, virtual = judged.get(gauge) or 0.0, outcome.gauges[gauge]
        error = virtual / real - 1
        print(
            f"{gauge:18} measured {real:.4g}  simulated {virtual:.4g}  {error:+.1%}  "
            f"{'holds' if abs(error) <= limit else 'MISSES'} ± {limit:.0%}"
        )


if __name__ == "__main__":
    main()
