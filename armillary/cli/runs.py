"""`armillary runs`: the runs of this home, newest first, or everything about one."""

import time
from typing import Any

import click

from armillary.cli import completion
from armillary.cli.output import Output
from armillary.cli.verb_decorator import verb
from armillary.spec.toml.fields import to_plain
from armillary.store.home import Home
from armillary.store.run_state import RunState
from armillary.store.runs import Run, find_run, list_runs
from armillary.units import seconds_text


@verb
@click.argument("name", required=False, shell_complete=completion.runs)
def runs(out: Output, home: Home, name: str | None) -> None:
    """List runs with state, step, loss and age; with NAME (an id, a short name or a folder) show one."""
    if name:
        _show_one(out, find_run(home, name))
    else:
        _show_all(out, home)


def _show_all(out: Output, home: Home) -> None:
    runs = [(run, run.progress) for run in list_runs(home)]
    if runs:
        columns = ["run", "model", "state", "step", "loss", "started", "took"]
        out.table(
            "",
            columns,
            [
                [run.id, state.model, state.state, _step(state), state.loss, _ago(state.started), _took(state)]
                for run, state in runs
            ],
        )
    else:
        out.say(f"no runs in {home.runs}; armillary train starts one")
    out.result([_facts(run, state) for run, state in runs], quiet=[run.id for run, _ in runs])


def _show_one(out: Output, run: Run) -> None:
    state = run.progress
    facts = _facts(run, state)
    fields: list[tuple[str, object]] = [
        ("model", state.model),
        ("state", state.state),
        ("error", state.error),
        ("step", _step(state)),
        ("loss", state.loss),
        ("started", _ago(state.started)),
        ("took", _took(state)),
        ("host", state.host),
        ("checkpoints", facts["checkpoints"]),
        ("export", facts["export"]),
        ("overrides", facts["overrides"]),
        ("folder", str(run.folder)),
    ]
    out.fields(run.id, [(name, value) for name, value in fields if value not in (None, "", [])])
    if facts["export"]:
        out.say(f"next: armillary generate {run.name}")
    out.result(facts, quiet=str(run.folder))


def _facts(run: Run, state: RunState) -> dict[str, Any]:
    export = run.latest_export()
    return {
        "id": run.id,
        "name": run.name,
        "folder": str(run.folder),
        **to_plain(state),
        "state": state.state,
        "overrides": run.overrides,
        "checkpoints": run.checkpoint_steps(),
        "export": str(export) if export else None,
    }


def _step(state: RunState) -> str:
    return f"{state.step:,}" + (f"/{state.steps:,}" if state.steps else "")


def _ago(then: float) -> str | None:
    return f"{seconds_text(max(0.0, time.time() - then))} ago" if then else None


def _took(state: RunState) -> str | None:
    return seconds_text(max(0.0, state.updated - state.started)) if state.started else None
