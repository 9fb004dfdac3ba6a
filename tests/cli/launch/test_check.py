"""`armillary launch --check` with a target that only prints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from armillary.cli.launch.check import PRINTED_LINE, _may_repeat, measure_rank
from armillary.cluster.job import Job, JobState
from armillary.cluster.targets import TARGETS
from armillary.errors import NotFound
from armillary.spec.network_domains import Domain
from armillary.spec.recipe import recipe_from_dict
from armillary.spec.tables.launch_target import Launch
from armillary.store.cluster_probe import ClusterProbe, LinkProbe, RankProbe, probe_text
from armillary.store.home import Home

Cli = Callable[..., Any]
RECIPE = '[model]\nname = "armillary-2m"\n[train]\nsequence = 128\nbatch_tokens = 1024\n'


class Printing:
    """A target whose nodes print something and end at once."""

    def __init__(self, *printed: str) -> None:
        self.printed, self.cancelled = printed, 0

    def files(self, job: Job, recipe: str) -> dict[str, str]:
        return {}

    def submit(self, job: Job) -> str:
        for node, text in enumerate(self.printed):
            (job.logs / f"node-{node}.log").write_text(f"starting\n{text}\n")
        return "17"

    def state(self, job: Job) -> JobState:
        return JobState(state="finished")

    def fetch_logs(self, job: Job) -> None: ...

    def cancel(self, job: Job) -> None:
        self.cancelled += 1

    def domains(self, launch: Launch) -> dict[str, Domain]:
        return {}


def printed(*flops: float, rate: float = 1e9) -> str:
    probes = [
        RankProbe(rank=n, node=f"node{n}", device="a CPU", gemm_flops=each, copy_bytes_per_s=1e10)
        for n, each in enumerate(flops)
    ]
    network = LinkProbe(axis="nodes", ranks=(0, 1), between_nodes=True, bytes_per_s=rate, latency_s=1e-4)
    return f"{PRINTED_LINE}{probe_text(ClusterProbe(ranks=tuple(probes), network=network))}"


@pytest.fixture
def check(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`check(target)` runs a check named fox on that target, in place of Slurm."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.toml").write_text(RECIPE)

    def run(target: Printing, *more: str) -> Any:
        monkeypatch.setitem(TARGETS, "slurm", target)
        return cli("launch", "r.toml", "--on", "slurm", "--nodes", "2", "--run", "fox", *(more or ("--check",)))

    return run


def test_the_result_may_be_printed_on_any_node(check: Callable[..., Any]) -> None:
    ran = check(Printing("", printed(1e9, 1e9)))
    assert ran.code == 0 and "all 2 ranks and their links are alike" in ran.out


def test_a_check_that_fails_does_not_report_the_one_before(check: Callable[..., Any]) -> None:
    assert check(Printing(printed(1e9, 1e9), "")).code == 0
    silent = Printing()
    ran = check(silent)
    assert ran.code == 2 and "the check finished without a result" in ran.err and silent.cancelled == 1


def test_outliers_are_left_out_of_the_job_of_that_name(check: Callable[..., Any], home: Home) -> None:
    ran = check(Printing(printed(1e9, 1e8), ""))
    assert ran.code == 1 and "--set 'launch.options=[\"--exclude=node1\"]'" in ran.out
    assert not (home.peaks / "network.json").exists(), "links of outliers are not for plans"
    ran = check(Printing(), "--dry-run")
    assert "leaving out node1, as its check said" in ran.out and '"--exclude=node1"' in ran.out
    assert check(Printing(printed(1e9, 1e9), "")).code == 0
    assert "leaving out" not in check(Printing(), "--dry-run").out
    assert (home.peaks / "network.json").exists()


def test_devices_without_a_ceiling_are_named(check: Callable[..., Any]) -> None:
    assert "compared with each other only, not with a ceiling" in check(Printing(printed(1e9, 1e9))).out
    sets = ("hardware.on=dgx-h200x2", "train.batch_tokens=2048")
    ran = check(Printing(printed(1e9, 1e9)), "--check", *(word for each in sets for word in ("--set", each)))
    assert "no ceiling is known for a CPU, so ranks were compared with each other only; armillary bench" in ran.out


def test_measuring_again_ends_within_the_time_of_a_check() -> None:
    assert _may_repeat(4, 4) and _may_repeat(39, 4)
    assert not _may_repeat(39, 25) and not _may_repeat(41, 4)


def test_ranks_wait_for_each_other_no_longer_than_a_check_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = []

    def join_world(device: str | None = None, *, timeout_s: float = 600.0) -> None:
        given.append(timeout_s)
        raise NotFound("no ranks here")

    monkeypatch.setattr("armillary.parallel.world.join_world", join_world)
    with pytest.raises(NotFound):
        measure_rank(recipe_from_dict({"model": {"name": "gpt2"}}), tmp_path / "check.json")
    assert given == [60.0]
