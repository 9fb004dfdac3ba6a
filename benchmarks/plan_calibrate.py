"""Corrections by a machine's own runs: two small runs on the CPU calibrate, and a third is planned before it runs.

    python -m benchmarks.plan_calibrate [--steps 18] [--write]

The third is planned twice, without and with the correction. Nothing else may run meanwhile.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from armillary.cli.output import Output
from armillary.cli.plan.calibrate import calibrate_with
from armillary.machine.machine import here
from armillary.planning.device_model.correction import corrections
from armillary.planning.device_model.vectorised_layouts import as_arrays
from armillary.planning.training.layout_prediction import predict
from armillary.planning.training.resolve_recipe import resolve
from armillary.spec.plan import Plan
from armillary.spec.recipe import Recipe, load_recipe
from armillary.store.gauges import columns
from armillary.store.home import Home
from benchmarks.planned_on_cpu import RECIPE, WARM_UP, measure
from tests.planted.train_small import train_recipe

PAGE = Path(__file__).parent / "plan_calibrate.md"
SEEN = {
    "2 M, row by row": ("model.name=armillary-2m", "layout.dp=1", "layout.micro_batch=1"),
    "demo, one process": ("layout.dp=1", "layout.micro_batch=16"),
}
UNSEEN = {"25 M, 512 tokens": ("model.name=armillary-25m", "train.sequence=512", "layout.dp=1", "layout.micro_batch=4")}
HEADS = ("run", "planned", "measured", "planned / measured")


def main() -> int:
    asked = _arguments()
    with tempfile.TemporaryDirectory(prefix="armillary-calibrate-") as folder:
        home, rows = Home.at(folder), []
        measure(home, ranks=2)
        names = []
        for name, changes in SEEN.items():
            run, planned, measured = trained(changes, home, asked.steps)
            names.append(run)
            rows.append(cells(name, planned, measured))
        calibrate_with(Output("human"), home, names)
        known = corrections(home)
        for name, changes in UNSEEN.items():
            before = uncorrected_s(load_recipe(RECIPE, changes), home)
            _, planned, measured = trained(changes, home, asked.steps)
            rows.append(cells(f"{name}, not corrected", before, measured))
            rows += [cells(f"{name}, corrected", planned, measured)] if known else []
    if asked.write:
        PAGE.write_text(page(rows, known[0].text() if known else "nothing: it would not have helped"))
    return 0


def trained(changes: tuple[str, ...], home: Home, steps: int) -> tuple[str, float, float]:
    """(name of the run, step as planned before it, step as measured)."""
    job = (f"train.steps={steps}", "train.eval_every=0", "train.save_every=0", "train.profile_every=0")
    run = train_recipe(load_recipe(RECIPE, (*changes, *job)), home)
    planned = Plan.from_json(run.plan.read_text(), str(run.plan)).predicted["step_s"]
    (step,) = (median(values[WARM_UP:]) for values in columns(run.gauges, ["step_s"]).values())
    return run.name, planned, step


def uncorrected_s(recipe: Recipe, home: Home) -> float:
    """The step as planned from measured ceilings alone."""
    problem = resolve(recipe, recipe.model_config(), recipe.cluster(here(device="cpu")), home, is_corrected=False)
    return float(predict(problem.case, as_arrays([problem.layout])).time.total[0])


def cells(name: str, planned: float, measured: float) -> list[str]:
    row = [name, f"{1e3 * planned:.0f} ms", f"{1e3 * measured:.0f} ms", f"{planned / measured:.2f}"]
    print(" ".join(f"{cell:<24}" for cell in row).rstrip(), flush=True)
    return row


def page(rows: list[list[str]], factors: str) -> str:
    day, machine = time.strftime("%Y-%m-%d", time.gmtime()), here().text()
    lines = [
        "# Plans corrected by a machine's own runs",
        "",
        f"`python -m benchmarks.plan_calibrate --write`, {day}, {machine}. The first two runs calibrate "
        "(`armillary plan calibrate`); the last is planned before it runs, with their correction. Medians over steps.",
        "",
        f"Correction: {factors}.",
        "",
        "| " + " | ".join(HEADS) + " |",
        "|---|---:|---:|---:|",
    ]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan_calibrate", description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=18)
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
