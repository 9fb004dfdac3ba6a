"""`armillary launch` in process: a stand-in for Python plays the ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Cli = Callable[..., Any]
RECIPE = """[model]
name = "armillary-2m"
[layout]
dp = 2
precision = "fp32"
[train]
sequence = 128
batch_tokens = 1024
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.toml").write_text(RECIPE)
    return "r.toml"


def stand_in(folder: Path, body: str) -> str:
    """As --set launch.python=…: a program that gets what Python would."""
    path = folder / "python"
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)
    return f"launch.python={path}"


def until(cli: Cli, job: str, wanted: str) -> dict[str, Any]:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        facts: dict[str, Any] = next(each for each in cli("launch", "jobs", "--json").json if each["job"] == job)
        if facts["state"] == wanted:
            return facts
        time.sleep(0.05)
    raise AssertionError(facts)


def test_a_dry_run_shows_plan_and_scripts_and_writes_nothing(cli: Cli, recipe: str, tmp_path: Path) -> None:
    ran = cli("launch", recipe, "--nodes", "2", "--dry-run")
    assert ran.code == 0 and "layout            dp=2" in ran.out and "2 nodes × 1 rank; nothing was" in ran.out
    assert "share its cores" in ran.err
    files = cli("launch", recipe, "--nodes", "2", "--dry-run", "--json").json["files"]
    assert set(files) == {"recipe.toml", "node-0.sh", "node-1.sh"} and "nodes = 2" in files["recipe.toml"]
    assert "--nodes 2 --ranks 1" in files["node-1.sh"]
    assert "--node-rank 1 --node-id local-1 -- train" in files["node-1.sh"]
    assert not (tmp_path / "jobs").exists()


def test_a_job_runs_in_the_background_and_is_listed(cli: Cli, recipe: str, tmp_path: Path) -> None:
    python = stand_in(tmp_path, 'echo "ranks of $FAMILY: $*"')
    more = ("--set", python, "--set", "launch.setup=export FAMILY=lynx")
    assert cli("launch", recipe, *more, "--run", "fox", "-q").out == "fox\n"
    facts = until(cli, "fox", "finished")
    assert (facts["nodes"], facts["ranks"], facts["step"]) == (1, 2, None)
    said = cli("launch", "logs", "fox").out
    assert said.startswith("ranks of lynx: -m armillary.cluster.node --nodes 1 --ranks 2 --id fox ")
    assert "--run fox --devices 2 --yes" in said
    followed = cli("launch", "logs", "fox", "--follow").out.splitlines()
    assert followed == [said.rstrip(), "job fox finished"]
    assert "fox" in cli("launch", "jobs").out.splitlines()[1]
    assert cli("launch", "cancel", "fox").code == 2, "it has ended"


def test_a_job_is_cancelled_and_started_again(cli: Cli, recipe: str, tmp_path: Path) -> None:
    body = 'trap "echo saved; exit 1" TERM; echo up; while :; do sleep 0.05; done'
    set_python = ("--set", stand_in(tmp_path, body))
    cli("launch", recipe, *set_python, "--run", "fox", "--nodes", "2")
    until(cli, "fox", "running")
    while len(cli("launch", "logs", "fox", "-q").out.splitlines()) < 2:
        time.sleep(0.05)
    again = cli("launch", recipe, *set_python, "--run", "fox")
    assert again.code == 2 and "job fox is still there; stop it with armillary launch cancel fox" in again.err
    assert cli("launch", "cancel", "fox").code == 0
    until(cli, "fox", "cancelled")
    said = set(cli("launch", "logs", "fox", "-q").out.splitlines())
    assert {f"node {node} | {word}" for node in (0, 1) for word in ("saved", "up")} <= said
    assert "saved" in cli("launch", "logs", "fox", "--node", "1", "-q").out.splitlines()
    stand_in(tmp_path, "exit 7")
    cli("launch", recipe, *set_python, "--run", "fox", "--nodes", "2")
    assert until(cli, "fox", "failed")["detail"] == "node 0 ended with 7, node 1 ended with 7"


def test_a_job_whose_ranks_saved_and_ended_is_stopped(cli: Cli, recipe: str, tmp_path: Path) -> None:
    """As after SIGTERM to the ranks: it is no failure, and resumes."""
    cli("launch", recipe, "--set", stand_in(tmp_path, "exit 75"), "--run", "fox")
    assert until(cli, "fox", "stopped")["detail"] == "resumable"
    assert "stopped (resumable)" in cli("launch", "jobs").out
    cancelled = cli("launch", "cancel", "fox")
    assert cancelled.code == 2 and "has ended (stopped)" in cancelled.err


def test_an_elastic_job_goes_on_without_a_node(cli: Cli, recipe: str, tmp_path: Path) -> None:
    """Node 1 is lost at once, node 0 ends well: the job has finished."""
    body = 'echo "$*"; [[ "$*" == *"--node-rank 1"* ]] && exit 137; sleep 0.3'
    cli("launch", recipe, "--nodes", "1:2", "--set", stand_in(tmp_path, body), "--run", "fox")
    until(cli, "fox", "finished")
    said = cli("launch", "logs", "fox", "--node", "0").out
    assert "--nodes 2 --least 1 --ranks 1 " in said and "--devices 1 --yes" in said
    for nodes, hint in (("2:1", "try --nodes 1:1"), ("0", "try --nodes 1"), ("a:2", "try --nodes 4, or --nodes 2:4")):
        assert hint in cli("launch", recipe, "--nodes", nodes).err
    ran = cli("launch", recipe, "--nodes", "1:2", "--on", "ray", "--dry-run")
    assert ran.code == 2 and "give one number, like --nodes 2" in ran.err


def test_what_is_missing_is_said_in_one_line(cli: Cli, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    ran = cli("launch", recipe, "--on", "slurm")
    assert ran.code == 2 and ran.err.endswith(
        "sbatch is not installed here; log in to a machine of the Slurm cluster, or choose another --on\n"
    )
    ran = cli("launch", recipe, "--on", "slurm", "--interactive", "--run", "hen")
    assert ran.code == 2 and "salloc is not installed here; log in" in ran.err
    assert "hen" not in cli("launch", "jobs").out, "nothing was written"
    ran = cli("launch", recipe, "--on", "ssh", "--nodes", "2", "--dry-run")
    assert "2 nodes need as many hosts and launch.hosts has 0; try --set launch.hosts=HOST1,HOST2" in ran.err
    assert "no job 'wolf'" in cli("launch", "logs", "wolf").err


def test_a_target_that_does_not_answer_once_has_not_lost_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    from armillary.cli.launch import job_state
    from armillary.cluster.job import JobState

    states = iter(["running", "unknown", "unknown", "running", "finished"])
    monkeypatch.setattr(job_state, "state_of", lambda job: JobState(state=next(states, "unknown")))  # type: ignore[arg-type]
    is_over = job_state.Ending(None)  # type: ignore[arg-type]
    assert [is_over() for _ in range(5)] == [False, False, False, False, True]
    assert [is_over() for _ in range(job_state.MOST_UNKNOWN)].index(True) == job_state.MOST_UNKNOWN - 1
