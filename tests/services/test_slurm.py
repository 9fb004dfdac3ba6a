"""Training on a real Slurm with two nodes: signalled before its limit, requeued and resumed; jobs, logs, cancel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from armillary.cluster import slurm as slurm_target
from armillary.spec.tables.launch_target import Launch
from tests.services.slurm_cluster import missing_programs, running_slurm
from tests.services.small_training import RECIPE, SLOW_STEPS, same_weights, write_text

pytestmark = [
    pytest.mark.services,
    pytest.mark.skipif(bool(missing_programs()), reason="Slurm is missing; apt install slurm-wlm munge"),
]
LONG_S = 1800.0
"""for a busy machine; an idle one needs five minutes"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    folder = tmp_path_factory.mktemp("cluster")
    with running_slurm(folder / "slurm") as env:
        yield {**env, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}


@pytest.fixture
def armillary(slurm: dict[str, str], tmp_path: Path) -> Callable[..., str]:
    """The command line in a folder of its own."""
    write_text(tmp_path / "text")

    def run(*words: str, **more: str) -> str:
        command = [sys.executable, "-m", "armillary", *words]
        done = subprocess.run(
            command, env={**slurm, **more}, cwd=tmp_path, capture_output=True, text=True, timeout=LONG_S
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def state(armillary: Callable[..., str], job: str) -> str:
    return str(next(each for each in json.loads(armillary("launch", "jobs", "--json")) if each["job"] == job)["state"])


def wait_for(done: Callable[[], bool], what: Callable[[], str]) -> None:
    end = time.monotonic() + LONG_S
    while not done():
        assert time.monotonic() < end, what()
        time.sleep(1)


def test_a_job_is_signalled_before_its_limit_and_resumed(
    armillary: Callable[..., str], slurm: dict[str, str], tmp_path: Path
) -> None:
    """Once it has been requeued with a checkpoint it gets a longer limit: a busy machine may need all of the first."""
    recipe = RECIPE.format(text=tmp_path / "text", steps=400, more="grace_s = 30")
    limits = "[launch]\ntime_limit_s = 240\nsignal_s = 60\n"
    slow = f'[launch.environment]\nPYTHONPATH = "{SLOW_STEPS}{os.pathsep}{Path(__file__).parents[2]}"\n'
    (tmp_path / "r.toml").write_text(recipe + limits + slow)
    answer = json.loads(armillary("launch", "r.toml", "--on", "slurm", "--nodes", "2", "--run", "fox", "--json"))

    def log_now() -> str:
        return armillary("launch", "logs", "fox")

    wait_for(lambda: "goes back into the queue" in log_now() and "checkpoint " in log_now(), log_now)
    subprocess.run(["scontrol", "update", f"JobId={answer['id']}", "TimeLimit=60"], env=slurm, check=True)
    wait_for(lambda: state(armillary, "fox") not in ("pending", "running"), log_now)
    log = armillary("launch", "logs", "fox")
    assert state(armillary, "fox") == "finished", log
    assert "goes back into the queue" in log and "node 1 of 2 is node2" in log
    lines = next(tmp_path.glob("runs/*-fox/events.jsonl")).read_text().splitlines()
    events = [json.loads(line)["event"] for line in lines]
    assert events.count("resumed") >= 1 and "failed" not in events
    assert "finished after 400 steps" in log and " from step " in log
    (tmp_path / "plain.toml").write_text(recipe)
    armillary("train", "plain.toml", "--devices", "2", "--run", "hen")
    assert same_weights(tmp_path, "fox", "hen")


def test_a_job_is_cancelled_after_it_has_saved(armillary: Callable[..., str], tmp_path: Path) -> None:
    recipe = RECIPE.format(text=tmp_path / "text", steps=100_000, more="")
    (tmp_path / "r.toml").write_text(recipe)
    armillary("launch", "r.toml", "--on", "slurm", "--nodes", "2", "--run", "elk")
    wait_for(lambda: "loss" in armillary("launch", "logs", "elk"), lambda: armillary("launch", "logs", "elk"))
    assert state(armillary, "elk") == "running"
    armillary("launch", "cancel", "elk")
    wait_for(lambda: state(armillary, "elk") == "cancelled", lambda: armillary("launch", "jobs"))

    def facts() -> dict[str, Any]:
        return json.loads(armillary("runs", "elk", "--json"))  # type: ignore[no-any-return]

    # Slurm says cancelled while the ranks still save
    wait_for(lambda: facts()["state"] == "interrupted", lambda: armillary("launch", "logs", "elk"))
    assert facts()["checkpoints"], armillary("launch", "logs", "elk")


def test_an_interactive_allocation(slurm: dict[str, str], tmp_path: Path) -> None:
    write_text(tmp_path / "text")
    (tmp_path / "r.toml").write_text(RECIPE.format(text=tmp_path / "text", steps=4, more=""))
    command = [sys.executable, "-m", "armillary", "launch", "r.toml", "--on", "slurm", "--nodes", "2", "--interactive"]
    typed = "echo nodes: $SLURM_JOB_NUM_NODES\nbash jobs/owl/slurm.sh && echo trained\nexit\n"
    done = subprocess.run(
        [*command, "--run", "owl"], env=slurm, cwd=tmp_path, input=typed, capture_output=True, text=True, timeout=LONG_S
    )
    assert "nodes: 2" in done.stdout and "trained" in done.stdout, done.stdout + done.stderr
    assert next(tmp_path.glob("runs/*-owl/export/4/model.safetensors")).is_file()


def test_the_switches_of_nodes_are_their_domains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same from `scontrol`, before a job runs, and from what Slurm tells its tasks."""
    switches = "SwitchName=leaf1 Nodes=node1\nSwitchName=leaf2 Nodes=node2\nSwitchName=spine Switches=leaf[1-2]\n"
    with running_slurm(tmp_path / "slurm", switches) as env:
        for name in ("SLURM_CONF", "PATH"):
            monkeypatch.setenv(name, env[name])
        known = slurm_target.domains(Launch())
        program = "from armillary.machine.network_domain import network_domain as n; print(*n())"
        command = ["srun", "--nodes=2", sys.executable, "-c", program]
        root = str(Path(__file__).parents[2])
        done = subprocess.run(command, env={**env, "PYTHONPATH": root}, capture_output=True, text=True, timeout=LONG_S)
    assert known == {"node1": ("switch=spine", "switch=leaf1"), "node2": ("switch=spine", "switch=leaf2")}
    assert sorted(done.stdout.splitlines()) == ["switch=spine switch=leaf1", "switch=spine switch=leaf2"], done.stderr
