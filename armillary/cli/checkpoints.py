"""`armillary checkpoints`: the checkpoints of a run, listed, verified, thinned out, exported and compared."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from armillary.cli import completion
from armillary.cli.output import Output, path_text
from armillary.cli.verb_decorator import VerbGroup, model_code_option
from armillary.errors import ArmillaryError, BadData, BadInput, NotFound
from armillary.spec.recipe import recipe_from_dict
from armillary.store.home import Home
from armillary.store.runs import Run, find_run, list_runs
from armillary.units import bytes_text, count_text, seconds_text

if TYPE_CHECKING:
    from armillary.training.checkpoint.retention import Policy

checkpoints = VerbGroup("checkpoints", help="List, verify, prune, export and compare the checkpoints of a run.")

run_argument = click.argument("name", metavar="RUN", shell_complete=completion.runs)
step_argument = click.argument("step", type=int, required=False)
_MOST_TENSORS = 20


@checkpoints.verb
@click.argument("name", metavar="[RUN]", required=False, shell_complete=completion.runs)
def ls(out: Output, home: Home, name: str | None) -> None:
    """List the checkpoints of RUN (the newest run where none is named), and why each is kept."""
    run = _run(home, name)
    rows = _rows(run)
    if rows:
        columns = ["step", "age", "size", "loss", "val_loss", "kind", "ranks", "state", "kept as"]
        out.table(run.id, columns, [[row.get(column) for column in columns] for row in rows])
    else:
        out.say(f"run {run.name} has no checkpoint yet; train.save_every says when it writes one")
    out.result(rows, quiet=[str(row["step"]) for row in rows])


def _rows(run: Run) -> list[dict[str, Any]]:
    from armillary.training.checkpoint import checkpoint
    from armillary.training.checkpoint.retention import reasons

    entries = [checkpoint.entry(run, step) for step in run.checkpoint_steps()]
    reason_of = reasons([entry for entry in entries if entry.complete], _policy(run))
    rows = []
    for entry in entries:
        folder = run.checkpoint(entry.step)
        about = _facts(folder)
        rows.append(
            {
                "step": entry.step,
                "age": f"{seconds_text(max(0.0, time.time() - folder.stat().st_mtime))} ago",
                "size": bytes_text(_bytes(folder)),
                "loss": about.get("loss"),
                "val_loss": entry.val_loss,
                "kind": "full" if entry.base is None else f"delta of {entry.base}",
                "ranks": about.get("ranks"),
                "state": "complete" if entry.complete else "damaged",
                "kept as": reason_of.get(entry.step, ""),
            }
        )
    damaged = sorted((run.folder / "checkpoints").glob("*.damaged*"))
    return rows + [{"step": path.name, "size": bytes_text(_bytes(path)), "state": "damaged"} for path in damaged]


@checkpoints.verb
@run_argument
@step_argument
def show(out: Output, home: Home, name: str, step: int | None) -> None:
    """Show one checkpoint of RUN (the newest where no STEP is given): facts, files, tensors."""
    from armillary.training.checkpoint.checkpoint_diff import tensor_shapes

    run = find_run(home, name)
    step = _step(run, step)
    folder = run.checkpoint(step)
    about, tensors = _facts(folder), tensor_shapes(folder)
    numbers = sum(size.numel() for size, _ in tensors.values())
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    keys = ("loss", "val_loss", "tokens_total", "layout", "ranks", "restarts_total", "delta_of")
    rows: list[tuple[str, object]] = [(key, about[key]) for key in keys if about.get(key) is not None]
    rows += [("tensors", f"{len(tensors)}, {count_text(numbers)} numbers"), ("size", bytes_text(sum(files.values())))]
    out.fields(f"{run.id} step {step:,}", [*rows, ("folder", path_text(folder))])
    out.table("", ["file", "size"], [[file, bytes_text(size)] for file, size in files.items()])
    shapes = {name: {"shape": list(size), "dtype": str(dtype)} for name, (size, dtype) in tensors.items()}
    out.result({"step": step, "facts": about, "files": files, "tensors": shapes}, quiet=str(folder))


@checkpoints.verb
@run_argument
@step_argument
def verify(out: Output, home: Home, name: str, step: int | None) -> None:
    """Read checkpoints of RUN (all, or that of STEP) and compare every file with its checksum."""
    from armillary.training.checkpoint.checkpoint import faults

    run = find_run(home, name)
    steps = [_step(run, step)] if step is not None else run.checkpoint_steps()
    faults_of: dict[int, list[str]] = {}
    with out.progress("verifying", total=sum(_bytes(run.checkpoint(number)) for number in steps), unit="B") as bar:
        for number in steps:
            faults_of[number] = faults(run, number)
            bar.update(_bytes(run.checkpoint(number)))
    for number, texts in faults_of.items():
        out.say(f"{number}: {'as it was written' if not texts else '; '.join(texts)}")
    out.result(faults_of, quiet=[str(number) for number, texts in faults_of.items() if not texts])
    damaged = [number for number, texts in faults_of.items() if texts]
    if damaged:
        raise BadData(
            f"{len(damaged)} of {len(faults_of)} checkpoints of run {run.name} are damaged; armillary train sets them "
            "aside and continues from the newest good one"
        )


@checkpoints.verb
@run_argument
@click.option("--keep", type=click.IntRange(1), help="Newest to keep.  [default: the run's train.keep]")
@click.option("--every", "interval", type=click.IntRange(0), help="Keep every so many steps as well.")
@click.option("--best", type=click.IntRange(0), help="Keep as many of the lowest val_loss as well.")
@click.option("--dry-run", is_flag=True, help="Say what would be deleted.")
def prune(
    out: Output, home: Home, name: str, keep: int | None, interval: int | None, best: int | None, dry_run: bool
) -> None:
    """Delete the checkpoints of RUN that its recipe, or these options, do not keep, and what runs left in memory."""
    from dataclasses import replace

    from armillary.training.checkpoint import checkpoint
    from armillary.training.checkpoint.peer_copies import sweep_memory
    from armillary.training.checkpoint.retention import removable

    run = find_run(home, name)
    if not dry_run and run.is_held_elsewhere():
        raise BadInput(f"{run.held_text}, and deletes old checkpoints itself; set train.keep, or stop it first")
    policy = _policy(run)
    policy = replace(
        policy,
        last=policy.last if keep is None else keep,
        interval=policy.interval if interval is None else interval,
        best=policy.best if best is None else best,
    )
    entries = [checkpoint.entry(run, step) for step in run.checkpoint_steps()]
    gone = removable(entries, policy)
    size = sum(_bytes(run.checkpoint(step)) for step in gone)
    freed = 0
    if not dry_run:
        checkpoint.prune(run, policy)
        freed = sweep_memory()
    what = "would delete" if dry_run else "deleted"
    steps = ", ".join(map(str, gone)) or "nothing"
    out.say(f"{what} {steps} ({bytes_text(size)}) of {len(entries)} checkpoints of run {run.name}")
    if freed:
        out.say(f"freed {bytes_text(freed)} of memory with copies of runs that do not need them any more")
    out.result(
        {"deleted": gone, "bytes": size, "memory_bytes": freed, "dry_run": dry_run}, quiet=[str(step) for step in gone]
    )


@checkpoints.verb
@run_argument
@step_argument
@click.option("--out", "target", type=click.Path(path_type=Path), help="Folder to write.  [default: in the run]")
@model_code_option
def export(out: Output, home: Home, name: str, step: int | None, target: Path | None) -> None:
    """Write a checkpoint of RUN (the newest where no STEP is given) as a Hugging Face folder, on the CPU."""
    from armillary.training.checkpoint.export_saved import export_saved

    run = find_run(home, name)
    number = _step(run, step)
    folder = export_saved(run, number, target or run.export(number))
    out.say(f"checkpoint {number} of run {run.name} is in {path_text(folder)}; next: armillary generate {folder}")
    out.result({"step": number, "folder": str(folder)}, quiet=str(folder))


@checkpoints.verb
@run_argument
@click.argument("first", type=int)
@click.argument("second", type=int)
@click.option("--other", metavar="RUN", help="The run of SECOND, where it is another one.")
def diff(out: Output, home: Home, name: str, first: int, second: int, other: str | None) -> None:
    """Compare two checkpoints of RUN: how much each tensor has changed (‖b − a‖ / ‖a‖), and which facts have."""
    from armillary.training.checkpoint.checkpoint_diff import changed_facts, compare

    first_run = find_run(home, name)
    second_run = find_run(home, other) if other else first_run
    a, b = first_run.checkpoint(_step(first_run, first)), second_run.checkpoint(_step(second_run, second))
    with out.progress("comparing", unit="B") as bar:
        changes = list(compare(a, b, bar.at))
    changes.sort(key=lambda change: -(float("inf") if change.relative is None else change.relative))
    facts = changed_facts(a, b)
    out.fields(f"{a.name} → {b.name}", [(key, f"{x} → {y}") for key, (x, y) in facts.items() if key != "kernels"])
    differs = [change for change in changes if change.relative is None or change.relative > 0]
    rows = [[c.name, c.relative, c.largest, c.note] for c in differs[:_MOST_TENSORS]]
    out.table("", ["tensor", "‖b − a‖/‖a‖", "largest", ""], rows)
    equal = len(changes) - len(differs)
    out.say(f"{len(differs)} of {len(changes)} tensors differ, {equal} are bit-equal in value")
    tensors = {c.name: {"relative": c.relative, "largest": c.largest, "note": c.note} for c in changes}
    out.result({"facts": facts, "tensors": tensors}, quiet=[c.name for c in differs])


def _run(home: Home, name: str | None) -> Run:
    if name:
        return find_run(home, name)
    runs = list_runs(home)
    if not runs:
        raise NotFound(f"no run in {home.runs} yet; armillary train starts one")
    return runs[0]


def _step(run: Run, step: int | None) -> int:
    """The step asked for, or the newest."""
    steps = run.checkpoint_steps()
    if not steps:
        raise NotFound(f"run {run.name} has no checkpoint yet; armillary train writes them")
    if step is not None and step not in steps:
        raise NotFound(f"run {run.name} has no checkpoint {step}; it has {', '.join(map(str, steps[-8:]))}")
    return steps[-1] if step is None else step


def _policy(run: Run) -> Policy:
    from armillary.training.checkpoint.retention import Policy

    return Policy.of(recipe_from_dict(run.recipe).train)


def _facts(folder: Path) -> dict[str, Any]:
    from armillary.training.checkpoint.checkpoint import read_facts

    try:
        return read_facts(folder)
    except ArmillaryError:
        return {}


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
