"""`armillary diagnose`: which loop limits a run, a server or a trace, what in it, and what each lever would gain."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from armillary.cli import completion
from armillary.cli.output import Output, path_text
from armillary.cli.run_sizes_text import say_run_sizes
from armillary.cli.verb_decorator import VerbGroup
from armillary.diagnosis.evidence.thresholds import MIN_SPEEDUP
from armillary.diagnosis.outcome.track_record import TrackRecord, read_record
from armillary.errors import BadInput
from armillary.spec.recipe import Recipe, recipe_from_dict
from armillary.store.home import Home
from armillary.store.runs import Run

if TYPE_CHECKING:
    from armillary.diagnosis.evidence.finding import Lever
    from armillary.diagnosis.outcome.compare import Comparison
    from armillary.diagnosis.outcome.diagnosis import Diagnosis
    from armillary.diagnosis.readings.reading import Reading, ReadingKind


SHOWN_LEVERS = 5
SHOWN_PART = 0.005
"""share below which a part of the budget is left out"""


class DiagnoseGroup(VerbGroup):
    """`diagnose RUN` is short for `diagnose look RUN`; --track-record needs no run."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in ("-h", "--help") and args[0] not in self.commands and not ctx.resilient_parsing:
            if "--track-record" in args:
                args = ["track-record", *(arg for arg in args if arg != "--track-record")]
            else:
                args = ["look", *args]
        return super().parse_args(ctx, args)


diagnose = DiagnoseGroup(
    "diagnose",
    help="Name the loop that limits, and price what would help.\n\n"
    "`armillary diagnose RUN` also takes a server's URL, a trace, gauges.jsonl, or a log of "
    "someone else's training; `--apply N` writes the recipe with lever N applied.",
)


@diagnose.verb
@click.argument("targets", nargs=-1, required=True, shell_complete=completion.runs)
@click.option("--apply", "number", type=click.IntRange(1), metavar="N", help="Write the recipe with lever N applied.")
@click.option("--to", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="File of that recipe.")
@click.option("--alerts", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Prometheus alerts.")
@click.option("--watch", type=click.FloatRange(1), metavar="SECONDS", help="Again every so many seconds.")
def look(
    out: Output,
    home: Home,
    targets: tuple[str, ...],
    number: int | None,
    to: Path | None,
    alerts: Path | None,
    watch: float | None,
) -> None:
    """Which loop limits, on what evidence, and what each lever would gain.

    A target is a run, a server's URL, a trace, gauges.jsonl, or a log of someone else's training. Several runs of one
    job at different sizes are compared: where does the speed per device drop, and why?
    """
    if to is not None and number is None:
        raise BadInput(f"--to {to} says where a changed recipe goes; add --apply N")
    if len(targets) > 1:
        if number is not None or alerts is not None or watch is not None:
            raise BadInput("--apply, --alerts and --watch are for one run; name one")
        return say_run_sizes(out, home, targets)
    if watch is not None:
        if number is not None or alerts is not None:
            raise BadInput("--watch only looks; leave out --apply and --alerts")
        return follow(out, home, targets[0], watch)
    _look_once(out, home, targets[0], number, to, alerts)


def _look_once(out: Output, home: Home, target: str, number: int | None, to: Path | None, alerts: Path | None) -> None:
    from armillary.diagnosis.diagnose import diagnose as diagnose_reading
    from armillary.diagnosis.outcome.alerts import alerts as alerts_of
    from armillary.diagnosis.outcome.diagnosis import save
    from armillary.diagnosis.readings.open_reading import open_reading
    from armillary.store.atomic import write_text

    reading = open_reading(target, home)
    diagnosis = diagnose_reading(reading, home)
    run = _run_of(target, reading, home)
    if run is not None and not _is_url(target):  # a server's page is a moment of its run
        save(run, diagnosis, home)
    if number is not None:
        return _apply(out, home, diagnosis, run, number, to)
    say(out, diagnosis, target, applies=run is not None)
    if alerts is not None:
        write_text(alerts, alerts_of(diagnosis, reading))
        out.say(f"alerts: {path_text(alerts)}, for rule_files of Prometheus")
    limit = f"{diagnosis.loop} {diagnosis.cause}" if diagnosis.loop else ""
    out.result(diagnosis, quiet=limit or ("healthy" if diagnosis.judged else "cannot be judged"))


def follow(out: Output, home: Home, target: str, seconds: float, wait: Callable[[float], None] = time.sleep) -> None:
    """The verdict every so many seconds, in one line while it stays the same, until it is interrupted."""
    from armillary.diagnosis.diagnose import diagnose as diagnose_reading
    from armillary.diagnosis.readings.open_reading import open_reading

    before = None
    try:
        while True:
            diagnosis = diagnose_reading(open_reading(target, home), home)
            out.say(time.strftime("%H:%M:%S"))
            if (diagnosis.loop, diagnosis.cause) == before:
                out.say(f"  {diagnosis.headline}")
            else:
                say(out, diagnosis, target, applies=False)
            before = (diagnosis.loop, diagnosis.cause)
            wait(seconds)
    except KeyboardInterrupt:
        return


@diagnose.verb
@click.argument("a", shell_complete=completion.runs)
@click.argument("b", shell_complete=completion.runs)
def compare(out: Output, home: Home, a: str, b: str) -> None:
    """What a lever was predicted to gain and what was obtained: run A before, run B after."""
    from armillary.diagnosis.outcome.compare import compare as compare_runs
    from armillary.store.runs import find_run

    comparison = compare_runs(find_run(home, a), find_run(home, b), home)
    say_comparison(out, home, comparison)
    out.result(comparison, quiet=f"{comparison.obtained:.4f}")


def say_comparison(out: Output, home: Home, comparison: Comparison) -> None:
    """Predicted and obtained, in two lines."""
    from armillary.diagnosis.evidence.finding import value_text

    name = "step" if comparison.of == "step_s" else comparison.of
    told = f"predicted {comparison.predicted:.2f} ×" if comparison.predicted else "this change was not predicted"
    changed = ", ".join(f"{key}={value}" for key, value in comparison.change.items()) or "no key of the recipe"
    out.say(
        f"{name} {value_text(comparison.of, comparison.before)} → {value_text(comparison.of, comparison.after)}   "
        f"obtained {comparison.obtained:.2f} ×   {'nothing is logged' if comparison.notes else told}   "
        f"(track record: {_record(out, home).summary})"
    )
    out.say(f"changed: {changed}")
    for note in comparison.notes:
        out.say(f"note: {note}")


def _record(out: Output, home: Home) -> TrackRecord:
    """The track record; broken lines are reported."""
    record = read_record(home)
    for note in record.notes:
        out.warn(note)
    return record


@diagnose.verb
def track_record(out: Output, home: Home) -> None:
    """Every lever that was applied or compared: predicted, obtained, and the median error."""
    record = _record(out, home)
    if record.levers:
        rows = [
            [
                line.run,
                line.title,
                line.of,
                f"{line.predicted:.2f} ×",
                f"{line.obtained:.2f} ×" if line.obtained is not None else None,
                f"{line.error:.0%}" if line.error is not None else None,
            ]
            for line in record.levers
        ]
        out.table("", ["run", "lever", "of", "predicted", "obtained", "error"], rows)
    out.say(f"track record: {record.summary}")
    out.result({"levers": record.levers, "median_error": record.median_error}, quiet=record.summary)


# --- the verdict


def say(out: Output, diagnosis: Diagnosis, target: str, *, applies: bool = True) -> None:
    """The verdict as people read it; `applies`: there is a recipe that levers can change."""
    out.say(diagnosis.headline)
    for name, text in [*_evidence(diagnosis), *_others(diagnosis), *_levers(diagnosis)]:
        out.say(f"  {name:<11} {text}")
    for note in diagnosis.notes:
        out.say(f"  {'note':<11} {note}")
    if diagnosis.loop and not diagnosis.findings[0].levers:
        out.say(f"  {'lever':<11} no change of the recipe is known that acts on this")
    number = first_worthwhile(diagnosis)
    if number is not None and diagnosis.loop and applies:
        out.say(f"apply: armillary diagnose {target} --apply {number}")


def first_worthwhile(diagnosis: Diagnosis) -> int | None:
    """Number of the first lever that changes the recipe and is predicted to gain enough."""
    levers = enumerate(diagnosis.levers, 1)
    return next((number for number, lever in levers if lever.change and lever.speedup > MIN_SPEEDUP), None)


def _evidence(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    from armillary.diagnosis.evidence.finding import evidence_text
    from armillary.profiling.report.profile_text import PART_WORDS

    shares = sorted(
        ((part, share) for part, share in diagnosis.budget.items() if share >= SHOWN_PART), key=lambda x: -x[1]
    )
    budget = "   ".join(f"{PART_WORDS.get(part, part.replace('_', ' '))} {share:.0%}" for part, share in shares)
    rows = [("evidence", budget)] if budget else []
    limiting = diagnosis.findings[0].evidence if diagnosis.findings and not diagnosis.is_healthy else ()
    return rows + [("" if rows or i else "evidence", evidence_text(evidence)) for i, evidence in enumerate(limiting)]


def _others(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    rest = diagnosis.findings[0 if diagnosis.is_healthy else 1 :]
    return [
        ("also", finding.says)
        for finding in rest
        if finding.says not in diagnosis.headline
        if finding.share >= 0.02
        or finding.cause == "memory_pressure"
        or any(lever.at_most is not None for lever in finding.levers)  # only a trial tells what it gains
    ]


def _levers(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    shown = diagnosis.levers[:SHOWN_LEVERS]
    width = max((len(lever.title) for lever in shown), default=0)
    return [(f"lever {i}", lever_text(lever, width)) for i, lever in enumerate(shown, 1)]


def lever_text(lever: Lever, width: int = 0) -> str:
    gain = f"predicted {lever.gain_text}" + (f" in {lever.of}" if lever.of != "step_s" else "")
    if lever.speedup <= MIN_SPEEDUP and lever.at_most is None:
        return f"{lever.title:<{width}}   {gain}   not worth it"
    return f"{lever.title:<{width}}   {gain}   risk {lever.risk}   {lever.sets or lever.action}"


# --- levers applied


def _is_url(target: str) -> bool:
    return target.startswith(("http://", "https://"))


def _run_of(target: str, reading: Reading, home: Home) -> Run | None:
    """The run that was pointed at: itself, its gauges.jsonl, or the page of the server that writes it."""
    from armillary.errors import NotFound
    from armillary.store.runs import Run, find_run, is_run_folder, list_runs

    path = Path(target).expanduser()
    if _is_url(target):
        return next((run for run in list_runs(home) if run.id == reading.settings.get("run")), None)
    if path.is_file():
        inside = path.name == "gauges.jsonl" and is_run_folder(path.parent)
        return Run(folder=path.parent.absolute()) if inside else None
    try:
        return find_run(home, target)
    except NotFound:
        return None


def _apply(out: Output, home: Home, diagnosis: Diagnosis, run: Run | None, number: int, to: Path | None) -> None:
    if run is None:
        raise BadInput(f"--apply changes the recipe of a run, and {diagnosis.source} is none; change it by hand")
    path, lever = write_lever(out, home, diagnosis, run, number, to), diagnosis.lever(number)
    command = next_command(run, lever, diagnosis.kind, path, home)
    if f" {MODEL} " in command:
        out.say(f"{MODEL} is the folder with the weights: the run names none that is there")
    out.say(f"next: {command}")
    when = "   (after the same requests)" if diagnosis.kind == "serving" else ""
    out.say(f"then: {shlex.join(['armillary', 'diagnose', 'compare', run.name, 'NEW_RUN', *place(home)])}{when}")
    out.result({"recipe": str(path), "lever": lever, "command": command}, quiet=str(path))


def write_lever(out: Output, home: Home, diagnosis: Diagnosis, run: Run, number: int, to: Path | None = None) -> Path:
    """The recipe with lever `number` applied, as a file; its prediction is logged in the track record."""
    from armillary.diagnosis.outcome.apply_lever import apply_lever, recipe_name

    lever = diagnosis.lever(number)
    path = (to or Path(recipe_name(run, number))).absolute()
    logged = apply_lever(home, diagnosis, run, number, path)
    out.say(f"{lever.title}: predicted {lever.speedup:.2f} ×, written to {path_text(path)}")
    if f"{logged:.2f}" != f"{lever.speedup:.2f}":
        out.say(f"{logged:.2f} × was predicted before: the outcome is compared with that")
    return path


MODEL = "MODEL"
"""what is printed where a run was not of stored weights"""


def next_command(run: Run, lever: Lever, kind: ReadingKind, recipe: Path, home: Home) -> str:
    """The command as a person would type it."""
    from armillary.diagnosis.evidence.finding import overrides_of

    words = ["train", path_text(recipe)]
    if kind == "serving":
        asked = recipe_from_dict(run.recipe, overrides_of(lever.change))
        words = ["serve", served_model(asked), "--recipe", path_text(recipe), *_flags(asked)]
    return f"armillary {shlex.join([*words, *place(home)])}"


def place(home: Home) -> list[str]:
    """--home, where it was given."""
    return ["--home", path_text(home.work)] if home.work == home.cache else []


def served_model(asked: Recipe) -> str:
    """What `armillary serve` takes for the model of a run: its folder, its Hub id, or MODEL."""
    path = Path(asked.model.path).expanduser()
    if asked.model.path and (path / "config.json").is_file():
        return path_text(path)
    return asked.model.name if "/" in asked.model.name else MODEL


def _flags(asked: Recipe) -> list[str]:
    """Settings that come from the command line rather than from [serve]."""
    layout = asked.layout
    cut = ["--tp", str(layout.tp)] if layout.tp > 1 else []
    if asked.serve.dtype != "auto" or layout.precision not in ("fp32", "bf16", "fp16"):
        return cut
    return [*cut, "--set", f"serve.dtype={layout.precision}"]  # auto may find another one now
