"""`armillary runs`: the runs of a home."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from armillary.store.gauges import GaugeWriter
from armillary.store.hang_verdict import HangVerdict, write_verdict
from armillary.store.home import Home
from armillary.store.run_events import add_event
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
    assert header.split() == ["run", "model", "state", "step", "loss", "goodput", "started", "took"]
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


def test_where_the_time_of_a_run_went(cli: Cli, home: Home) -> None:
    run = a_run(home)
    rows = [(0, "created", 0), (4, "steps", 0), (12, "saving", 8), (14, "steps", 8), (16, "failed", 0)]
    for now, event, step in rows:
        add_event(run.folder, event, now=float(now), step=step)  # type: ignore[arg-type]
    add_event(run.folder, "resumed", now=18.0, seen=16.0)
    add_event(run.folder, "steps", now=19.0, step=8)
    add_event(run.folder, "stopped", now=23.0, step=12)
    out = cli("runs", run.name).out
    lines = [line.split() for line in out.splitlines()]
    assert ["useful", "steps", "12", "s", "52.2%"] in lines and ["repeated", "steps", "2", "s", "8.7%"] in lines
    assert ["together", "23", "s", "100%"] in lines and "Amdahl" in out and "suggested by this run" in out
    facts = cli("runs", run.name, "--json").json["goodput"]
    assert sum(facts["seconds"].values()) == facts["total_s"] == 23 and facts["failures"] == 1
    assert facts["suggested"]["rate_is_measured"] and facts["suggested"]["interval_s"] > 0
    assert "52%" in cli("runs").out.splitlines()[1]


def test_a_hang_and_a_straggler_are_shown(cli: Cli, home: Home) -> None:
    run = a_run(home)
    write_verdict(run.folder, HangVerdict(cause="desync", rank=1, text="rank 1 is in broadcast; fix that", time=1.0))
    with GaugeWriter(run.gauges) as writer:
        for step in range(60):
            late = {"rank_spread_s": 0.4, "slowest_rank": 1.0, "slowest_rank_data_s": 0.3}
            writer.write({"loss": 3.0, "step_s": 1.0} | late, step=step)
    add_event(run.folder, "waiting", excluded="the node on h2 is left out: rank 5 was late")
    shown = cli("runs", run.name)
    assert "ago: the node on h2 is left out: rank 5 was late" in shown.out
    assert "rank 1 is in broadcast; fix that" in shown.out
    assert "straggler: rank 1 is 400 ms per step later than the others since step" in shown.out
    assert "waiting for its data" in shown.out
    assert cli("runs", run.name, "--json").json["verdict"]["cause"] == "desync"
