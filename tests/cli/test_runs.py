"""`armillary runs`: the runs of a home."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from armillary.store.gauges import GaugeWriter
from armillary.store.home import Home
from armillary.store.runs import Run, create_run

Cli = Callable[..., Any]


def a_run(home: Home) -> Run:
    run = create_run(home, {"train": {"steps": 20}}, model="armillary-2m", steps=20, overrides=["train.steps=20"])
    run.update(step=12, loss=3.5, state="interrupted")
    return run


def test_no_runs_yet_says_what_starts_one(cli: Cli, home: Home) -> None:
    ran = cli("runs")
    assert (ran.code, ran.out) == (0, f"no runs in {home.runs}; armillary train starts one\n")
    assert cli("runs", "--json").json == [] and cli("runs", "-q").out == ""


def test_the_list(cli: Cli, home: Home) -> None:
    run = a_run(home)
    header, line = cli("runs").out.splitlines()
    assert header.split() == ["run", "model", "state", "step", "loss", "started", "took"]
    assert line.split()[:5] == [run.id, "armillary-2m", "interrupted", "12/20", "3.5"] and "ago" in line
    assert cli("runs", "-q").out == f"{run.id}\n"
    assert cli("runs", "--json").json[0]["loss"] == 3.5


def test_a_run_that_was_cut_off_shows_its_last_record(cli: Cli, home: Home) -> None:
    run = a_run(home)
    with GaugeWriter(run.gauges) as writer:
        writer.write({"loss": 2.5}, step=16)
    assert cli("runs").out.splitlines()[1].split()[3:5] == ["12/20", "3.5"], "one that was stopped has noted it"
    run.update(state="failed")
    assert cli("runs").out.splitlines()[1].split()[3:5] == ["17/20", "2.5"]
    assert cli("runs", run.name, "--json").json["step"] == 17
    run.update(step=18, loss=2.25)
    assert cli("runs", "--json").json[0]["step"] == 18


def test_one_run_by_its_short_name(cli: Cli, home: Home) -> None:
    run = a_run(home)
    run.checkpoint(10).mkdir(parents=True)
    out = cli("runs", run.name).out
    assert out.splitlines()[0] == run.id and "train.steps=20" in out and "checkpoints" in out
    facts = cli("runs", run.name, "--json").json
    assert facts["id"] == run.id and facts["checkpoints"] == [10] and facts["export"] is None
    assert cli("runs", run.id, "-q").out == f"{run.folder}\n"


def test_a_misspelt_run_gets_the_nearest(cli: Cli, home: Home) -> None:
    run = a_run(home)
    ran = cli("runs", run.name[:-1] + "q")
    assert ran.code == 2 and f"did you mean {run.name}?" in ran.err
