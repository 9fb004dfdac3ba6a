"""`armillary runs`: the runs of this home, newest first, or everything about one."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from armillary.cli import completion
from armillary.cli.output import Output
from armillary.cli.verb_decorator import verb
from armillary.errors import ArmillaryError
from armillary.planning.cost.measured_failures import MeasuredFailures, measured_failures
from armillary.spec.plan import Plan
from armillary.spec.toml.fields import to_plain
from armillary.store.goodput import GoodputAccount, account_of_run
from armillary.store.hang_verdict import read_verdict
from armillary.store.home import Home
from armillary.store.run_events import read_events
from armillary.store.run_state import RunState
from armillary.store.runs import Run, find_run, list_runs
from armillary.units import ago_text, duration_text, seconds_text

if TYPE_CHECKING:
    from armillary.diagnosis.evidence.stragglers import Straggler


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
        columns = ["run", "model", "state", "step", "loss", "goodput", "started", "took"]
        out.table(
            "",
            columns,
            [
                [
                    run.id,
                    state.model,
                    state.state,
                    state.step_text(),
                    state.loss,
                    _goodput(run),
                    _ago(state.started),
                    _took(state),
                ]
                for run, state in runs
            ],
        )
    else:
        out.say(f"no runs in {home.runs}; armillary train starts one")
    out.result([_facts(run, state) for run, state in runs], quiet=[run.id for run, _ in runs])


def _show_one(out: Output, run: Run) -> None:
    state, account = run.progress, account_of_run(run, now=time.time())
    facts = _facts(run, state) | ({"goodput": goodput_facts(run, account)} if account is not None else {})
    fields: list[tuple[str, object]] = [
        ("model", state.model),
        ("state", state.state),
        ("error", state.error),
        ("step", state.step_text()),
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
    if account is not None:
        _say_goodput(out, run, account)
    _say_trouble(out, run)
    if facts["export"]:
        out.say(f"next: armillary generate {run.name}")
    out.result(facts, quiet=str(run.folder))


def _say_trouble(out: Output, run: Run) -> None:
    """The last hang of the run, nodes that were left out, and a rank that is later than the others, where there are."""
    for event in read_events(run.folder):
        if "excluded" in event.more:
            out.say(f"{_ago(event.time)}: {event.more['excluded']}")
    if (verdict := read_verdict(run.folder)) is not None:
        out.say(f"{'was hung' if verdict.resolved else 'hung'} {_ago(verdict.time)}: {verdict.text}")
    if (slow := straggler_of(run)) is not None:
        how = f"{seconds_text(slow.seconds)} per step later than the others since step {slow.since:,}"
        why = "waiting for its data" if slow.cause == "data" else "in its own work"
        out.say(f"straggler: rank {slow.rank} is {how}, {why}; armillary diagnose {run.name} says what that costs")


def straggler_of(run: Run) -> Straggler | None:
    """The rank that others have been waiting for lately; None where there is none, or too little is known."""
    from armillary.diagnosis.evidence.stragglers import recent_straggler
    from armillary.diagnosis.readings.run_folder import read_gauges_file

    try:
        reading = read_gauges_file(run.gauges)
    except ArmillaryError:
        return None
    return recent_straggler(reading, reading.plan) if reading.kind == "training" else None


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
        "verdict": to_plain(verdict) if (verdict := read_verdict(run.folder)) is not None else None,
    }


# --- goodput


def _goodput(run: Run) -> str | None:
    account = account_of_run(run, now=time.time())
    return f"{account.goodput_fraction:.0%}" if account is not None and account.total_s else None


def _say_goodput(out: Output, run: Run, account: GoodputAccount) -> None:
    """Where every second went, what each part costs the whole job, and the checkpoint interval that follows."""
    rows = [[name, seconds_text(seconds), f"{share:.1%}"] for name, seconds, share in account.rows()]
    out.say()
    rows.append(["together", seconds_text(account.total_s), "100%"])
    out.table("where the time went", ["", "took", "share"], rows)
    out.say()
    faster = [[name, f"{share:.1%}", f"{speedup:.2f} ×"] for name, share, speedup in account.amdahl()]
    out.table("the whole job without it (Amdahl)", ["", "share", "faster"], faster)
    measured = measured_failures(account, num_devices=_num_devices(run))
    if measured is not None:
        rows_of = [
            ("failures", measured.num_failures),
            ("goodput", measured.goodput_text()),
            ("checkpoints", measured.text()),
        ]
        out.say()
        out.fields("suggested by this run", rows_of)


def _num_devices(run: Run) -> int:
    try:
        return Plan.from_json(run.plan.read_text(), str(run.plan)).layout.num_devices
    except (ArmillaryError, OSError):
        return 1


def goodput_facts(run: Run, account: GoodputAccount) -> dict[str, Any]:
    """The account as --json prints it."""
    measured = measured_failures(account, num_devices=_num_devices(run))
    return {
        "total_s": account.total_s,
        "goodput_fraction": account.goodput_fraction,
        "seconds": dict(account.seconds),
        "data_wait_s": account.data_wait_s,
        "failures": account.num_failures,
        "restart_s": account.restart_s,
        "checkpoints": account.num_saves,
        "amdahl": [{"part": name, "share": share, "speedup": faster} for name, share, faster in account.amdahl()],
    } | ({"suggested": _suggested(measured)} if measured is not None else {})


def _suggested(measured: MeasuredFailures) -> dict[str, Any]:
    return {
        "interval_s": measured.best.interval_s,
        "young_s": measured.best.young_s,
        "daly_s": measured.best.daly_s,
        "rate_is_measured": measured.is_rate_measured,
        "measured_fraction": measured.measured_fraction,
        "predicted_fraction": measured.as_run.goodput_fraction,
    }


# --- texts


def _ago(then: float) -> str | None:
    return ago_text(then, time.time()) if then else None


def _took(state: RunState) -> str | None:
    return duration_text(max(0.0, state.updated - state.started)) if state.started else None
