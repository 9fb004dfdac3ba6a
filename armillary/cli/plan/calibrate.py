"""`armillary plan calibrate`: corrections of this cluster's plans, fitted to runs that were measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from armillary.cli.output import Output
from armillary.diagnosis.readings.open_reading import open_reading
from armillary.diagnosis.readings.reading import Reading
from armillary.errors import BadInput
from armillary.planning.calibrate.run_times import log_time, run_time
from armillary.planning.device_model.correction import (
    Correction,
    RunTime,
    corrections,
    fit_correction,
    fit_factors,
    remove_correction,
    save_correction,
)
from armillary.spec.recipe import load_recipe
from armillary.store.home import Home
from armillary.units import seconds_text


def say_corrections(out: Output, home: Home) -> None:
    """What is stored."""
    known = corrections(home)
    rows = [[each.chip, each.text(), ", ".join(each.runs), each.date] for each in known]
    if rows:
        out.table("corrections", ["chip", "factors", "runs", "fitted"], rows)
    else:
        out.say("no corrections are stored; armillary plan calibrate RUN… fits them to runs")
    out.result([each.factors | {"chip": each.chip} for each in known], quiet=[each.chip for each in known])


def forget(out: Output, home: Home, chip: str) -> None:
    gone = remove_correction(home, chip)
    out.say(f"plans for {chip} are no longer corrected (it was: {gone.text()})")
    out.result({"removed": chip}, quiet=chip)


def calibrate_with(out: Output, home: Home, names: Sequence[str]) -> None:
    """Fit the runs, say what each is off by, and keep the correction where it helps runs that it has not seen."""
    chips, runs = zip(*(_measured(name, home) for name in names), strict=True)
    if len(set(chips)) > 1:
        raise BadInput(f"these runs are of different chips ({', '.join(sorted(set(chips)))}); calibrate each by itself")
    correction = fit_correction(chips[0], runs)
    _say_runs(out, runs, correction)
    if correction.helps:
        save_correction(home, correction)
    after = correction.error_left_out
    what = (
        f"plans for {correction.chip} now have {correction.text()}"
        if correction.helps
        else "not kept: unseen runs came out no nearer"
    )
    unseen = f" → {after:.1%} of a run left out" if after is not None else "; two or more runs say what it is worth"
    out.say(f"mean error {correction.error_before:.1%}{unseen} · {what}".replace("%", " %"))
    answer = {"chip": correction.chip, "factors": correction.factors, "kept": correction.helps}
    errors = {"error_before": correction.error_before, "error_left_out": after}
    out.result(answer | errors, quiet="kept" if correction.helps else "not kept")


def _say_runs(out: Output, runs: Sequence[RunTime], correction: Correction) -> None:
    rows = []
    for run in runs:
        rest = fit_factors([other for other in runs if other is not run])
        errors = [run.error({}), run.error(correction.factors), *([run.error(rest)] if len(runs) > 1 else [])]
        texts = [f"{error * 100:+.1f} %".replace("-", "−") for error in errors]
        rows.append([run.name, seconds_text(run.measured_s), seconds_text(run.seconds({})), *texts])
    heads = ["run", "measured", "planned", "error", "corrected", "left out"]
    out.table("", heads[: len(rows[0])], rows)


def _measured(name: str, home: Home) -> tuple[str, RunTime]:
    """(chip, its step as measured and planned) of a run of ours, or of LOG=RECIPE.toml."""
    log, _, recipe_file = name.partition("=")
    reading = open_reading(log, home)
    step = reading.get("step_s")
    if reading.kind != "training" or not step:
        raise BadInput(f"{log} has no training steps; calibrate with training runs, or logs with LOG=RECIPE.toml")
    return (
        _with_recipe(reading, log, step, Path(recipe_file), home) if recipe_file else _ours(reading, name, step, home)
    )


def _with_recipe(reading: Reading, log: str, step: float, file: Path, home: Home) -> tuple[str, RunTime]:
    recipe = load_recipe(file)
    return recipe.cluster().chip.name, log_time(Path(log).name, step, reading.by, recipe, home)


def _ours(reading: Reading, name: str, step: float, home: Home) -> tuple[str, RunTime]:
    if reading.plan is None:
        raise BadInput(f"{name} has no plan; say what it ran with {name}=RECIPE.toml (armillary import makes one)")
    return reading.plan.cluster.chip.name, run_time(Path(name).name, step, reading.plan, home)
