"""`armillary plan calibrate`: corrections of this cluster's plans, fitted to runs that were measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from armillary.cli.output import Output
from armillary.cli.plan.options import find_cluster, model_config
from armillary.diagnosis.evidence.server_load import load_of
from armillary.diagnosis.readings.open_reading import open_reading
from armillary.diagnosis.readings.reading import Reading
from armillary.errors import BadInput
from armillary.planning.calibrate.engine_times import MeanStep, own_engine_time, page_time
from armillary.planning.calibrate.run_times import Described, log_time, run_time
from armillary.planning.device_model.correction import (
    Correction,
    RunTime,
    Work,
    corrections,
    fit_correction,
    fit_factors,
    remove_corrections,
    save_correction,
)
from armillary.spec.plan import Plan
from armillary.spec.recipe import load_recipe
from armillary.store.home import Home
from armillary.units import seconds_text


def say_corrections(out: Output, home: Home) -> None:
    """What is stored."""
    known = corrections(home)
    rows = [[each.chip, each.work, each.text(), ", ".join(each.runs), each.date] for each in known]
    if rows:
        out.table("corrections", ["chip", "plans of", "factors", "runs", "fitted"], rows)
    else:
        out.say("no corrections are stored; armillary plan calibrate RUN… fits them to runs")
    plain = [each.factors | {"chip": each.chip, "work": each.work} for each in known]
    out.result(plain, quiet=[each.chip for each in known])


def forget(out: Output, home: Home, chip: str) -> None:
    gone = remove_corrections(home, chip)
    was = "; ".join(f"{each.work} {each.text()}" for each in gone)
    out.say(f"plans for {chip} are no longer corrected (it was: {was})")
    out.result({"removed": chip}, quiet=chip)


def calibrate_with(out: Output, home: Home, names: Sequence[str]) -> None:
    """Fit the runs, say what each is off by, and keep the correction where it helps runs that it has not seen."""
    chips, works, runs = zip(*(_measured(out, name, home) for name in names), strict=True)
    for what, kinds in (("chips", chips), ("kinds", works)):
        if len(set(kinds)) > 1:
            raise BadInput(
                f"these runs are of different {what} ({', '.join(sorted(set(kinds)))}); calibrate each by itself"
            )
    correction = fit_correction(chips[0], runs, works[0])
    _say_runs(out, runs, correction)
    if correction.helps:
        save_correction(home, correction)
    after = correction.error_left_out
    what = (
        f"{correction.work} plans for {correction.chip} now have {correction.text()}"
        if correction.helps
        else "not kept: unseen runs came out no nearer"
    )
    unseen = f" → {after:.1%} of a run left out" if after is not None else "; two or more runs say what it is worth"
    out.say(f"mean error {correction.error_before:.1%}{unseen} · {what}".replace("%", " %"))
    out.result(
        {
            "chip": correction.chip,
            "work": correction.work,
            "factors": correction.factors,
            "kept": correction.helps,
            "error_before": correction.error_before,
            "error_left_out": after,
        },
        quiet="kept" if correction.helps else "not kept",
    )


def _say_runs(out: Output, runs: Sequence[RunTime], correction: Correction) -> None:
    rows = []
    for run in runs:
        rest = fit_factors([other for other in runs if other is not run])
        errors = [run.error({}), run.error(correction.factors), *([run.error(rest)] if len(runs) > 1 else [])]
        texts = [f"{error * 100:+.1f} %".replace("-", "−") for error in errors]
        rows.append([run.name, seconds_text(run.measured_s), seconds_text(run.seconds({})), *texts])
    heads = ["run", "measured", "planned", "error", "corrected", "left out"]
    out.table("", heads[: len(rows[0])], rows)


def _measured(out: Output, name: str, home: Home) -> tuple[str, Work, RunTime]:
    """(chip, training or serving, its step as measured and planned) of a run of ours, or of LOG=RECIPE.toml."""
    source, _, recipe_file = name.partition("=") if "=" in name else (name, "", "")
    reading = open_reading(source, home)
    if reading.kind == "serving":
        return _engine(out, reading, source, recipe_file, home)
    step = reading.get("step_s")
    if reading.kind != "training" or not step:
        raise BadInput(
            f"{source} has no steps; calibrate with runs of training or serving, or logs and pages with LOG=RECIPE.toml"
        )
    if recipe_file:
        described = _described(out, recipe_file, home)
        timed = log_time(Path(source).name, step, reading.by, described, home)
        return described.cluster.chip.name, "training", timed
    plan = _plan(reading, name)
    return plan.cluster.chip.name, "training", run_time(Path(name).name, step, plan, home)


def _engine(out: Output, reading: Reading, source: str, recipe_file: str, home: Home) -> tuple[str, Work, RunTime]:
    name = Path(source).name
    if not recipe_file:
        plan = _plan(reading, source)
        return plan.cluster.chip.name, "serving", own_engine_time(name, reading.steps, plan, home)
    load, described = load_of(reading), _described(out, recipe_file, home)
    if load is None:
        raise BadInput(f"{source} does not say how many requests run and how long they take; save it under load")
    mean = MeanStep(
        running=load.running,
        tokens_in=load.tokens_in,
        computed=load.computed,
        tokens_out=load.tokens_out,
        gap_s=load.gap_s,
    )
    return described.cluster.chip.name, "serving", page_time(name, mean, reading.by, described, home)


def _described(out: Output, recipe_file: str, home: Home) -> Described:
    recipe = load_recipe(Path(recipe_file))
    return Described(recipe=recipe, model=model_config(out, home, recipe), cluster=find_cluster(recipe))


def _plan(reading: Reading, name: str) -> Plan:
    if reading.plan is None:
        raise BadInput(f"{name} has no plan; say what it ran with {name}=RECIPE.toml (armillary import makes one)")
    return reading.plan
