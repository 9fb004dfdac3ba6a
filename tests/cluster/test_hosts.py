"""Jobs without a scheduler: what is asked of each node's shell, played by a function."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from armillary.cluster import hosts, ssh
from armillary.cluster.commands import TargetFailed
from armillary.cluster.job import Job
from armillary.spec.tables.launch_target import Launch

ALIVE = "alive\n"


def make_job(folder: Path, **changes: Any) -> Job:
    given = {"target": "ssh", "num_nodes": 2, "ranks_per_node": 1, "python": "python3", **changes}
    return Job(name="fox", folder=folder, work=folder, **given)


class FakeShell:
    """Answers per node, or an error where its host is down; keeps what it was asked."""

    def __init__(self, *answers: str | None) -> None:
        self.answers, self.asked = answers, list[tuple[int, str]]()

    def __call__(self, node: int, line: str) -> str:
        self.asked.append((node, line))
        answer = self.answers[node]
        if answer is None:
            raise TargetFailed(f"ssh refused (host {node} is down); try ssh by hand")
        return answer


def write_pids(folder: Path, *pids: int) -> None:
    for node, pid in enumerate(pids):
        (folder / f"pid-{node}").write_text(f"{pid}\n")


def test_cancel_signals_no_node_whose_process_is_not_known(tmp_path: Path) -> None:
    """`kill -- -0` would end the caller's own process group."""
    write_pids(tmp_path, 4711)
    shell = FakeShell("", "")
    hosts.cancel(make_job(tmp_path), shell)
    assert [(node, line.split(" 2>")[0]) for node, line in shell.asked] == [(0, "kill -TERM -- -4711")]


def test_a_script_that_begins_after_cancel_starts_no_ranks(tmp_path: Path) -> None:
    job = make_job(tmp_path, python="echo")
    (tmp_path / "cancelled").touch()
    done = subprocess.run(["bash", "-c", hosts.node_script(job, 1, "here:1")], capture_output=True, check=False)
    assert done.returncode == 143 and (tmp_path / "exit-1").read_text() == "143\n" and not done.stdout


def test_a_script_that_never_begins_is_lost_after_a_while(tmp_path: Path) -> None:
    write_pids(tmp_path, 4711)
    assert hosts.state(make_job(tmp_path), FakeShell(ALIVE, "")).detail == ""
    old = make_job(tmp_path, created=time.time() - 120)
    seen = hosts.state(old, FakeShell(ALIVE, ""))
    assert (seen.state, seen.detail) == ("running", "node 1 has not started")
    assert hosts.state(old, FakeShell("", "")).state == "failed"


@pytest.mark.parametrize(("answer", "why"), [("", "was killed"), (None, "does not answer")])
def test_a_job_runs_while_one_of_its_nodes_does(tmp_path: Path, answer: str | None, why: str) -> None:
    write_pids(tmp_path, 4711, 4712)
    seen = hosts.state(make_job(tmp_path), FakeShell(ALIVE, answer))
    assert (seen.state, seen.detail) == ("running", f"node 1 {why}")
    (tmp_path / "exit-0").write_text("1\n")
    seen = hosts.state(make_job(tmp_path), FakeShell(ALIVE, answer))
    assert (seen.state, seen.detail) == ("failed", f"node 1 {why}, node 0 ended with 1"), "it can be started again"


def test_a_job_of_which_no_host_answers_has_no_state(tmp_path: Path) -> None:
    write_pids(tmp_path, 4711, 4712)
    with pytest.raises(TargetFailed, match="host 0 is down"):
        hosts.state(make_job(tmp_path), FakeShell(None, None))


def test_a_dead_host_does_not_keep_the_others_from_being_cancelled(tmp_path: Path) -> None:
    write_pids(tmp_path, 4711, 4712, 4713)
    shell = FakeShell(None, "", None)
    with pytest.raises(TargetFailed, match="host 0 is down"):
        hosts.cancel(make_job(tmp_path, num_nodes=3), shell)
    assert [node for node, _ in shell.asked] == [0, 1, 2]
    assert hosts.state(make_job(tmp_path, num_nodes=3), FakeShell(None, "", None)).state == "cancelled"


def test_nodes_that_were_started_are_cancelled_when_a_later_one_cannot_be(tmp_path: Path) -> None:
    lines = []

    def shell(node: int, line: str) -> str:
        if node == 1:
            raise TargetFailed("ssh refused (host 1 is down); try ssh by hand")
        write_pids(tmp_path, 4711)
        lines.append(line)
        return ""

    with pytest.raises(TargetFailed, match="host 1 is down"):
        hosts.start(make_job(tmp_path), shell)
    assert "kill -TERM -- -4711" in lines[-1] and (tmp_path / "cancelled").exists()


def test_paths_may_have_spaces_and_apostrophes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "the fox's jobs"
    folder.mkdir()
    python = folder / "python"
    python.write_text("#!/bin/bash\necho ran\n")
    python.chmod(0o755)
    job = make_job(folder, num_nodes=1, python=str(python), launch=Launch(hosts=("a",)))
    lines = []

    def run_program(command: list[str], then: str) -> str:
        lines.append(command[-1])
        return subprocess.run(["bash", "-c", command[-1]], capture_output=True, text=True, check=True).stdout

    (folder / hosts.script_name(0)).write_text(hosts.node_script(job, 0, "here:1"))
    assert subprocess.run(["bash", folder / hosts.script_name(0)], capture_output=True, check=True).stdout == b"ran\n"
    monkeypatch.setattr(ssh, "run_program", run_program)
    monkeypatch.setattr(hosts, "start", lambda job, shell: job.name)
    assert ssh.submit(job) == "fox" and lines, "the folder was found"
