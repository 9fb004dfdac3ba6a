"""The simulator against a real server on the same requests; see simulator.md.

    python -m benchmarks.simulator_accuracy --trace AzureLLMInferenceTrace_conv.csv          a CPU, 2.5 minutes
    python -m benchmarks.simulator_accuracy --trace AzureLLMInferenceTrace_conv.csv --gpu    0.6B and 8B, one H200
    python -m benchmarks.simulator_accuracy --trace AzureLLMInferenceTrace_conv.csv --gpu --small   that way on a CPU

A server with random weights gets two parts of a public trace over HTTP, one after the other. Step times are fitted to
the first part; the requests of the second are simulated with them and compared with what its engine measured.
"""

from __future__ import annotations

import argparse
import itertools
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
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


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A model under a part of the trace."""

    model: str
    device: str
    seconds: float
    speed: float
    """of the trace's clock: Azure's conversations come 5.4 times a second"""
    longest: int | None
    """most tokens of a request"""
    serve: tuple[str, ...] = ()


CPU = (Setting(model="armillary-5m", device="cpu", seconds=45.0, speed=1.0, longest=512),)
GPU = (
    Setting(model="qwen3-0.6b", device="cuda", seconds=60.0, speed=4.0, longest=None),
    Setting(model="llama-3-8b", device="cuda", seconds=60.0, speed=2.0, longest=None),
)
SMALL = tuple(replace(each, model="armillary-5m", device="cpu", seconds=8.0, speed=1.0, longest=256) for each in GPU)
"""what a machine with a GPU runs, small enough for one without"""


def measured_run(home: Path, folder: Path, setting: Setting, part: Path) -> None:
    """One server under a part of the trace."""
    url = f"http://127.0.0.1:{next(_PORTS)}"
    armillary = [sys.executable, "-m", "armillary"]
    more = [text for key in setting.serve for text in ("--set", key)]
    serve = [*armillary, "serve", str(folder), "--port", url.rpartition(":")[2], "--home", str(home)]
    server = subprocess.Popen([*serve, "--device", setting.device, *more], stdout=subprocess.DEVNULL)
    try:
        wait_ready(url, server)
        sets = [f"load.trace={part}", f"load.trace_speed={setting.speed}", "load.warmup_s=2", "load.api=completions"]
        sets += [f"load.longest={setting.longest}"] if setting.longest else []
        load = [*armillary, "load", url, "--duration", str(setting.seconds), "-q", "--home", str(home)]
        subprocess.run([*load, *(text for each in sets for text in ("--set", each))], check=True)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()


def wait_ready(url: str, server: subprocess.Popen[bytes]) -> None:
    while True:
        try:
            urlopen(f"{url}/ready", timeout=1)
            return
        except OSError:
            assert server.poll() is None, "the server ended"
            time.sleep(0.2)


def parts_of(trace: Path, folder: Path, seconds: float, skip_s: float) -> list[Path]:
    """Two consecutive parts of a trace, of so many of its seconds each, from `skip_s` on."""
    from armillary.serving.load.trace import read_trace

    rows = read_trace(trace)
    parts = []
    for number in range(2):
        begin = skip_s + number * seconds
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


def judge(setting: Setting, trace: Path, folder: Path, skip_s: float) -> None:
    """Two measured runs, unless they are there, and the comparison."""
    from benchmarks.engine_start import make

    home = Home.at(folder / "home")
    if len(list_runs(home)) < 2:
        folder.mkdir(parents=True, exist_ok=True)
        make(folder / "model", setting.model, setting.device)
        for part in parts_of(trace, folder, (setting.seconds + 2) * setting.speed, skip_s):
            measured_run(folder / "home", folder / "model", setting, part)
    fitted, judged = (
        read_run(run, home) for run in sorted(list_runs(home), key=lambda run: run.gauges.stat().st_mtime)[-2:]
    )
    rate = judged.get("requests_per_s") or 0.0
    print(f"{setting.model} on {setting.device}: {len(judged.requests)} requests, {rate:.1f} per second")
    compare("step times of the part before", judged, simulated(fitted, judged, home))
    compare("step times of the same run, as armillary simulate --from RUN", judged, simulated(judged, judged, home))


def compare(name: str, judged: Reading, outcome: FleetOutcome) -> None:
    print(f"{name}: {outcome.case.cost.basis}")
    for gauge, limit in LIMITS.items():
        real, virtual = judged.get(gauge) or 0.0, outcome.gauges[gauge]
        error = virtual / real - 1
        print(
            f"  {gauge:18} measured {real:.4g}  simulated {virtual:.4g}  {error:+.1%}  "
            f"{'holds' if abs(error) <= limit else 'MISSES'} ± {limit:.0%}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--speed", type=float, help="of the trace's clock: another arrival rate")
    parser.add_argument("--skip", type=float, default=0.0, help="seconds of the trace before the first part")
    parser.add_argument("--seconds", type=float, help="of each of the two runs")
    parser.add_argument("--keep", type=Path, help="folder where the runs stay, and are taken from the next time")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        for setting in (SMALL if args.small else GPU) if args.gpu else CPU:
            changed = replace(setting, seconds=args.seconds or setting.seconds, speed=args.speed or setting.speed)
            judge(changed, args.trace, (args.keep or Path(name)) / f"{changed.model}-{changed.speed:g}", args.skip)


if __name__ == "__main__":
    main()
