"""Restarts of a run's ranks: as many as allowed without a new checkpoint, counted anew after one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from armillary.cli.train import launch as launching
from armillary.cli.train.launch import Launched, RankDied, RankFailed, launch
from armillary.cli.train.restarts import Restarts
from armillary.store.home import Home
from armillary.store.lease import read_lease
from armillary.store.run_events import read_events
from armillary.store.runs import Run, create_run
from armillary.training.checkpoint.peer_copies import memory_run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return create_run(Home.at(tmp_path / "home"), {})


def test_a_run_without_progress_is_restarted_a_few_times(run: Run) -> None:
    said: list[str] = []
    restarts = Restarts(run, 2, said.append)
    run.update(state="failed", error="rank 1 was killed")
    assert [restarts.allows("rank 1 was killed by signal 9") for _ in range(3)] == [True, True, False]
    assert "from the beginning" in said[0] and said[1].endswith("(restart 2 of 2)")
    assert [event.event for event in read_events(run.folder)] == ["restarting", "restarting"]
    assert run.state.state == "running" and run.state.error == ""
    lease = read_lease(run.folder)
    assert lease is not None and lease.is_ours and not lease.released


def test_a_new_checkpoint_allows_more(run: Run) -> None:
    restarts = Restarts(run, 1)
    for step in (10, 20, 30):
        run.checkpoint(step).mkdir(parents=True)
        assert restarts.allows("killed")
    assert not restarts.allows("killed") and not Restarts(run, 0).allows("killed")


def test_a_copy_in_memory_is_progress(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("armillary.training.checkpoint.peer_copies.ROOT", tmp_path)
    said: list[str] = []
    restarts = Restarts(run, 1, said.append)
    for step in (10, 20):
        memory_run(run).checkpoint(step).mkdir(parents=True)
        assert restarts.allows("killed")
    assert "again from step 20, which is in memory" in said[1] and not restarts.allows("killed")


@pytest.mark.parametrize(("error", "starts"), [(RankDied, 3), (RankFailed, 1)])
def test_only_ranks_that_died_are_started_again(
    error: type[RankFailed], starts: int, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a rank says of itself, as nan, would come back."""
    started = []

    def start(*_: Any, **__: Any) -> Launched:
        started.append(1)
        raise error("rank 0 was killed; see its log")

    monkeypatch.setattr(launching, "launch_once", start)
    with pytest.raises(RankFailed, match="was killed"):
        launch("program", {}, num_ranks=1, threads=1, logs=tmp_path, restarts=Restarts(run, 2))
    assert len(started) == starts
