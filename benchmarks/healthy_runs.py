"""Healthy runs next to busy processes: how many get a verdict of a hang? It must be none.

    python benchmarks/healthy_runs.py [--runs 20] [--ranks 2] [--seconds 40] [--page benchmarks/healthy_runs.md]

Each run trains on ranks of its own for about `--seconds`, with validation and checkpoints, while one process per core
computes and one writes to disk. Layouts alternate. A verdict is counted whether or not the run went on after it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from armillary.machine.cores import usable_cores
from armillary.machine.machine import here
from armillary.spec.recipe import recipe_from_dict, to_toml
from armillary.store.gauges import read_gauges
from armillary.store.hang_verdict import read_verdict
from armillary.store.home import Home
from armillary.store.runs import find_run

ROOT = Path(__file__).parents[1]
LAYOUTS = (["layout.dp=2"], ["layout.dp=2", "layout.zero=3"], ["layout.tp=2"], ["layout.pp=2"])
BASE = {
    "model": {"name": "armillary-2m", "vocab": 512},
    "hardware": {"on": "here"},
    "layout": {"precision": "fp32", "micro_batch": 2},
    "train": {
        "sequence": 128,
        "batch_tokens": 1024,
        "steps": 100_000,
        "eval_every": 25,
        "eval_batches": 2,
        "save_every": 25,
        "profile_every": 0,
        "on_hang": "wait",
        "max_restarts": 0,
    },
}


@dataclass(frozen=True, kw_only=True)
class Healthy:
    """How one run went."""

    layout: str
    steps: int
    seconds: float
    code: int
    verdict: str  # empty: none


def compute() -> None:
    while True:
        sum(number * number for number in range(100_000))


def write_files(folder: str) -> None:
    block = os.urandom(4 << 20)
    for number in range(10**9):
        path = Path(folder) / f"{number % 4}"
        with path.open("wb") as file:
            file.write(block)
            file.flush()
            os.fsync(file.fileno())
        time.sleep(0.02)


def write_corpus(folder: Path) -> Path:
    """A small text: preparing a large one next to busy processes would take longer than the runs."""
    folder.mkdir(parents=True)
    for number in range(40):
        lines = (f"def function_{number}_{line}(x):\n    return x + {line}\n" for line in range(60))
        (folder / f"{number}.py").write_text("\n".join(lines))
    return folder


def train(home: Home, name: str, overrides: list[str], ranks: int, seconds: float, corpus: Path) -> Healthy:
    """Train until its steps have taken `seconds`, then stop it as a person would."""
    recipe = Path(home.work) / f"{name}.toml"
    recipe.parent.mkdir(parents=True, exist_ok=True)
    recipe.write_text(to_toml(recipe_from_dict({**BASE, "data": {"source": str(corpus)}}, overrides)))
    line = [sys.executable, "-m", "armillary", "train", str(recipe), "--run", name, "--home", str(home.work)]
    line += ["--devices", str(ranks), "--device", "cpu", "--yes"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    child = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment)
    began, first = time.monotonic(), None
    while child.poll() is None and time.monotonic() - began < 20 * seconds:
        time.sleep(0.5)
        if first is None and steps_of(home, name):
            first = time.monotonic()
        if first is not None and time.monotonic() - first > seconds:
            break
    child.send_signal(signal.SIGINT)
    try:
        _, said = child.communicate(timeout=20 * seconds)
    except subprocess.TimeoutExpired:
        child.kill()
        _, said = child.communicate()
    verdict = read_verdict(find_run(home, name).folder)
    took = time.monotonic() - (first or began)
    if child.returncode:
        print(said, file=sys.stderr)
    return Healthy(
        layout=" ".join(overrides),
        steps=steps_of(home, name),
        seconds=took,
        code=child.returncode,
        verdict=f"{verdict.cause}: {verdict.text}" if verdict is not None else "",
    )


def steps_of(home: Home, name: str) -> int:
    try:
        return sum(1 for _ in read_gauges(find_run(home, name).gauges))
    except Exception:  # not opened yet
        return 0


def page(results: list[Healthy], busy: int) -> str:
    machine = here()
    rows = [f"| {r.layout} | {r.steps} | {r.seconds:.0f} | {r.code} | {r.verdict or 'none'} |" for r in results]
    count = sum(bool(r.verdict) for r in results)
    return "\n".join(
        [
            "# Healthy runs next to busy processes",
            "",
            f"{time.strftime('%Y-%m-%d', time.gmtime())}, {machine.chip.title}, {usable_cores()} cores; `python "
            f"benchmarks/healthy_runs.py`: beside each run, {busy} processes compute and one writes and syncs files.",
            "",
            f"**{count} verdicts in {len(results)} runs.**",
            "",
            "| layout | steps | seconds | exit code | verdict |",
            "|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--page", type=Path)
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what runs beside is ended on the way
    busy, results = usable_cores(), list[Healthy]()
    with tempfile.TemporaryDirectory(prefix="healthy-") as folder:
        beside = [multiprocessing.Process(target=compute, daemon=True) for _ in range(busy)]
        beside.append(multiprocessing.Process(target=write_files, args=(folder,), daemon=True))
        for process in beside:
            process.start()
        home, corpus = Home.at(Path(folder) / "home"), write_corpus(Path(folder) / "corpus")
        try:
            for number in range(asked.runs):
                layout = LAYOUTS[number % len(LAYOUTS)]
                results.append(train(home, f"healthy-{number}", list(layout), asked.ranks, asked.seconds, corpus))
                print(results[-1], flush=True)
                if asked.page:
                    asked.page.write_text(page(results, busy))
        finally:
            for process in beside:
                process.kill()
    failed = [each for each in results if each.verdict or each.code]
    print(f"{sum(bool(each.verdict) for each in results)} verdicts in {len(results)} runs")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
