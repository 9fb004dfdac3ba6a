"""Runs on gloo ranks that really hang: each is diagnosed within 30 s, by the launcher or by the lowest live rank."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from armillary.cli.train.launch import HangWatch, RankFailed, RunHung, launch
from armillary.cli.train.restarts import Restarts
from armillary.spec.recipe import Recipe, to_toml
from armillary.store import nan_safe_json
from armillary.store.hang_verdict import HangVerdict, read_verdict
from armillary.store.home import Home
from armillary.store.runs import Run, list_runs
from armillary.training.prepare_run import model_source, resolve_run
from tests.training.resilience.hanging_rank import STEP

Make = Callable[..., Recipe]
ROOT = Path(__file__).parents[3]
WITHIN_S = 30.0


def hang(recipe: Recipe, home: Home, fault: str, **settings: Any) -> tuple[Run, list[str], Any]:
    """Train on ranks with a fault: the run, what the launcher said, and how it ended."""
    begun = resolve_run(recipe, home, model_source(recipe, home), cpu_ranks=4)
    begun.prepare()
    run, said = begun.create_run(), list[str]()
    task = {
        "run": str(run.folder),
        "mode": "silent",
        "device": "cpu",
        "brief": True,
        "home": {"work": str(home.work), "cache": str(home.cache)},
        "until": "",
        "fault": fault,
        "once": str(run.folder / "hung"),
    }
    watch = HangWatch(folder=run.folder, say=said.append, **{"on_hang": "exit"} | settings)
    restarts = Restarts(run, 3, said.append) if watch.on_hang == "restart" else None
    program = "tests.training.resilience.hanging_rank"
    try:
        count = begun.plan.layout.num_devices
        ended: Any = launch(
            program, task, num_ranks=count, threads=1, logs=run.folder / "logs", watch=watch, restarts=restarts
        )
    except (RunHung, RankFailed) as error:
        ended = error
    return run, said, ended


def judged(run: Run) -> tuple[HangVerdict, float]:
    """The verdict, and the seconds from the fault to it."""
    verdict = read_verdict(run.folder)
    assert verdict is not None
    return verdict, verdict.time - Path(run.folder, "hung").stat().st_mtime


SHORT = ("train.steps=30", "train.eval_every=0", "train.save_every=20", "layout.dp=2", "train.checkpoint_async=false")
LONG = ("train.steps=1000", "train.eval_every=0", "train.save_every=20", "layout.dp=2")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "cause", "says"),
    [
        ("stops", "stopped_process", "rank 1 is stopped"),
        ("loader", "stuck_data_loader", "the data loader of rank 1"),
        ("computes", "slow_rank", "rank 1 computes"),
    ],
)
def test_a_rank_that_hangs_is_diagnosed(fault: str, cause: str, says: str, recipe: Make, home: Home) -> None:
    begin = time.monotonic()
    run, said, ended = hang(recipe(*LONG), home, fault)
    verdict, after_s = judged(run)
    assert isinstance(ended, RunHung) and str(ended) == verdict.text
    assert (verdict.cause, verdict.rank) == (cause, 1) and says in verdict.text and said[0].startswith(verdict.text)
    assert after_s < WITHIN_S, f"{after_s:.0f} s"
    assert verdict.collective is not None and verdict.collective.kind == "all_reduce"
    assert verdict.collective.sequence > 0 and verdict.collective.bytes > 0
    first, second = verdict.ranks
    assert first.step == STEP and first.lines and second.lines
    if fault == "stops":  # nothing is known of it but its last heartbeat, which may be of an earlier step
        assert f"it was last seen at {second.lines[0]}" in verdict.text
    else:
        where = verdict.text + " ".join(second.lines)
        assert "hanging_rank.py" in where or "step_batches.py" in where
    print(f"{fault}: {verdict.cause} of rank {verdict.rank} after {after_s:.1f} s")
    assert time.monotonic() - begin < 90


@pytest.mark.slow
@pytest.mark.parametrize("layout", [["layout.dp=2"], ["layout.dp=2", "layout.tp=2"]], ids=["one group", "several"])
def test_a_rank_that_skips_a_collective_is_diagnosed(layout: list[str], recipe: Make, home: Home) -> None:
    """In one group gloo aborts a rank at once, because sizes differ; where the groups differ, all ranks wait."""
    run, said, ended = hang(recipe(*LONG, *layout), home, "skips")
    verdict, after_s = judged(run)
    print(f"skips: {verdict.cause} of rank {verdict.rank} after {after_s:.1f} s")
    assert (verdict.cause, verdict.rank) == ("desync", 1) and after_s < WITHIN_S, verdict.text
    assert "armillary/parallel/apply.py" in verdict.text and "armillary/parallel/consensus.py" in verdict.text
    assert "number" in verdict.text and "bytes" in verdict.text and said and isinstance(ended, RunHung | RankFailed)


@pytest.mark.slow
def test_a_rank_that_dies_is_diagnosed_at_once(recipe: Make, home: Home) -> None:
    run, said, ended = hang(recipe(*LONG), home, "dies")
    verdict, after_s = judged(run)
    assert isinstance(ended, RankFailed) and "rank 1 was killed by signal 9" in str(ended)
    assert (verdict.cause, verdict.rank) == ("dead_process", 1) and "killed by signal 9" in verdict.text
    print(f"dies: {verdict.cause} of rank {verdict.rank} after {after_s:.1f} s")
    assert after_s < WITHIN_S and said


@pytest.mark.slow
def test_a_run_that_hangs_starts_again_from_its_checkpoint(recipe: Make, home: Home) -> None:
    _, said, ended = hang(recipe(*SHORT), home, "stops", on_hang="restart")
    assert ended.outcome["finished"] and ended.outcome["resumed_at"] == 20
    assert said[-1].startswith("rank 1 is stopped") and "start again from checkpoint 20 (restart 1 of 3)" in said[-1]


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "cause"), [("stops", "stopped_process"), ("loader", "stuck_data_loader")])
def test_ranks_of_torchrun_are_watched_by_one_of_them(
    fault: str, cause: str, recipe: Make, home: Home, tmp_path: Path
) -> None:
    """They exit, and torchrun starts them again from the newest checkpoint."""
    path, mark = tmp_path / "recipe.toml", tmp_path / "hung"
    path.write_text(to_toml(recipe(*SHORT, "train.on_hang=restart")))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    program = ["-m", "tests.training.resilience.hanging_cli", fault, str(mark), "train", str(path)]
    line = [sys.executable, *torchrun, *program, "--home", str(home.work), "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ended = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=600, check=False)
    (run,) = list_runs(home)
    verdict = read_verdict(run.folder)
    assert verdict is not None and (verdict.cause, verdict.rank) == (cause, 1), ended.stderr
    assert verdict.time - mark.stat().st_mtime < WITHIN_S and verdict.text in ended.stderr
    assert ended.returncode == 0, ended.stderr
    outcome = nan_safe_json.loads(ended.stdout)
    assert outcome["finished"] and outcome["resumed_at"] == 20
