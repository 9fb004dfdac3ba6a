"""Outliers are left out: by the job of the same name, and by what is copied from the check's last line."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from armillary.cluster import ssh
from armillary.cluster.excluded_nodes import exclude_text, excluded_nodes, note_excluded
from armillary.cluster.job import Job, jobs_folder
from armillary.spec.recipe import recipe_from_dict
from armillary.spec.tables.launch_target import Launch
from armillary.store.home import Home


def check(folder: Path, **changes: Any) -> Job:
    given = {"target": "slurm", "num_nodes": 2, "ranks_per_node": 1, "python": "python3", **changes}
    return Job(name="check-fox", folder=folder, work=folder, is_check=True, **given)


def copied(text: str) -> Launch:
    """[launch] of a recipe with the --set that the text has, as a shell passes it."""
    words = shlex.split(text.partition("; ")[2])
    return recipe_from_dict({"model": {"name": "gpt2"}}, [words[words.index("--set") + 1]]).launch


def test_slurm_is_told_once_and_keeps_other_options(tmp_path: Path) -> None:
    launch = Launch(options=("--qos=high", "--exclude=node[7-9]", '--comment="a, b"'))
    text = exclude_text(check(tmp_path, launch=launch), ["node1", "node2"])
    assert text.startswith("launch with --run fox leaves out node1, node2; ")
    assert copied(text).options == ("--qos=high", '--comment="a, b"', "--exclude=node[7-9],node1,node2")


def test_hosts_are_those_that_are_left(tmp_path: Path) -> None:
    job = check(tmp_path, target="ssh", launch=Launch(hosts=("alice@a", "b", "c")))
    text = exclude_text(job, ["b"])
    assert copied(text).hosts == ("alice@a", "c") and "--nodes" not in text
    assert exclude_text(job, ["b", "c"]).endswith(", and more hosts or --nodes 1")


def test_a_host_s_node_is_named_as_the_recipe_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh, "address_of", lambda host, options: "10.0.0.1")
    files = ssh.files(check(tmp_path, target="ssh", launch=Launch(hosts=("alice@a", "b"))), "")
    assert ["--node-id alice@a " in files["node-0.sh"], "--node-id b " in files["node-1.sh"]] == [True, True]


def test_targets_that_cannot_leave_a_node_out_say_so(tmp_path: Path) -> None:
    assert exclude_text(check(tmp_path, target="ray"), ["n1"]).startswith("--on ray has no way to leave a node out")
    assert exclude_text(check(tmp_path, target="kubernetes"), ["a", "b"]).endswith("kubectl cordon a b")


def test_what_a_check_named_holds_for_its_job_on_that_target(tmp_path: Path) -> None:
    home = Home.at(tmp_path)
    assert excluded_nodes(home, "fox", "slurm") == ()
    folder = jobs_folder(home) / "check-fox"
    folder.mkdir(parents=True)
    note_excluded(check(folder), ["node1"])
    assert excluded_nodes(home, "fox", "slurm") == ("node1",)
    assert excluded_nodes(home, "fox", "ssh") == () == excluded_nodes(home, "hen", "slurm")
