"""Steps as planned and as measured on this machine's CPU: one process and two ranks, several sizes and settings.

    python -m benchmarks.planned_on_cpu [--only NAME …] [--steps 18] [--write]

Ceilings are measured first, for all threads and for those of one rank; then every recipe is planned and trained.
Nothing else may run meanwhile: two ranks take every core of a small machine, and whatever else wants one holds both up.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch

from armillary.machine.machine import here
from armillary.profiling.ceilings.ceilings import measure_ceilings
from armillary.profiling.ceilings.collectives import QUICK_SIZES, measure_collectives
from armillary.spec.plan import Plan
from armillary.spec.recipe import load_recipe
from armillary.store.gauges import columns
from armillary.store.home import Home
from armillary.store.peaks import save_peaks
from tests.planted.train_small import train_recipe

PAGE = Path(__file__).parent / "planned_on_cpu.md"
RECIPE = Path(__file__).parent.parent / "armillary/cli/demo/demo.toml"
WARM_UP = 3
SECTIONS = ("gemm", "bandwidth", "attention", "passes", "launch")
CASES: dict[str, tuple[str, ...]] = {
    "demo": (),
    "demo, no recompute": ("layout.recompute=none",),
    "demo, one process": ("layout.dp=1", "layout.micro_batch=16"),
    "fp32, one process": ("layout.dp=1", "layout.precision=fp32"),
    "2 M": ("model.name=armillary-2m",),
    "2 M, row by row": ("model.name=armillary-2m", "layout.dp=1", "layout.micro_batch=1"),
    "25 M, 512 tokens": ("model.name=armillary-25m", "train.sequence=512", "layout.micro_batch=1"),
}
"""what differs from the demo's recipe: a 4 M model in bf16 on two ranks, everything recomputed"""
HEADS = ("recipe", "planned", "measured", "planned / measured", "main thread ran")


def main() -> int:
    asked = _arguments()
    with tempfile.TemporaryDirectory(prefix="armillary-planned-") as folder:
        home = Home.at(folder)
        measure(home, ranks=2)
        rows = [row(name, CASES[name], home, asked.steps) for name in asked.only or CASES]
    if asked.write:
        PAGE.write_text(as_page(rows))
    return 0


def measure(home: Home, ranks: int) -> None:
    """What plans rest on, quickly."""
    device, threads = torch.device("cpu"), torch.get_num_threads()
    for count in dict.fromkeys((threads, max(1, threads // ranks))):
        torch.set_num_threads(count)
        save_peaks(home, measure_ceilings(device, quick=True, only=SECTIONS, limit_s=30.0, folder=home.work).peaks)
    torch.set_num_threads(threads)
    between = measure_collectives(device, worlds=(ranks,), ops=("all_reduce",), sizes=QUICK_SIZES, budget_s=0.05)
    save_peaks(home, between.peaks)


def row(name: str, changes: Sequence[str], home: Home, steps: int) -> list[str]:
    """One recipe planned and trained, by HEADS."""
    job = (f"train.steps={steps}", "train.eval_every=0", "train.save_every=0", "train.profile_every=0")
    run = train_recipe(load_recipe(RECIPE, (*changes, *job)), home)
    planned = Plan.from_json(run.plan.read_text(), str(run.plan)).predicted["step_s"]
    found = columns(run.gauges, ["step_s", "host_cpu_s"])
    step, ran = (median(values[WARM_UP:]) for values in found.values())
    cells = [name, f"{1e3 * planned:.0f} ms", f"{1e3 * step:.0f} ms", f"{planned / step:.2f}", f"{1e3 * ran:.0f} ms"]
    print(" ".join(f"{cell:<20}" for cell in cells).rstrip(), flush=True)
    return cells


def as_page(rows: Sequence[Sequence[str]]) -> str:
    day = time.strftime("%Y-%m-%d", time.gmtime())
    lines = [
        "# Step times on a CPU: planned and measured",
        "",
        f"`python -m benchmarks.planned_on_cpu --write`, {day}, {here().text()}. Medians over steps; "
        "the last column is CPU time of the main rank's thread.",
        "",
        "| " + " | ".join(HEADS) + " |",
        "|---|" + "---:|" * (len(HEADS) - 1),
    ]
    return "\n".join([*lines, *("| " + " | ".join(cells) + " |" for cells in rows)]) + "\n"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planned_on_cpu", description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", choices=list(CASES), help="some recipes")
    parser.add_argument("--steps", type=int, default=18, help="of each run")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
