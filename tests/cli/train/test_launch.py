"""How the launcher ends: who is blamed, what follows a verdict, and that it is taken back when the run goes on."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from armillary.cli.main import BUG, USER_ERROR
from armillary.cli.train import launch as launching
from armillary.cli.train import rank as ranking
from armillary.cli.train.launch import HangWatch, RankDied, RankFailed, RunHung
from armillary.store.atomic import write_json
from armillary.store.hang_verdict import HangVerdict, read_verdict
from armillary.store.run_events import read_events


def failure(folder: Path, failed: dict[int, int]) -> BaseException:
    return launching._failure(folder, failed, folder / "logs", "train again", interrupted=False)


def fail_as_rank(error: Exception, rank: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the process of a rank leaves when its work raises."""

    def work(*_: Any) -> dict[str, Any]:
        raise error

    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setattr(ranking, "_print_to", lambda path: None)
    task = {"answers": str(folder), "logs": str(folder), "mode": "silent"}
    try:
        ranking.main(task, work)
    except type(error):
        return


@pytest.mark.parametrize(
    "failed", [{0: USER_ERROR, 1: BUG, 2: USER_ERROR}, {0: USER_ERROR}], ids=["all", "told to end"]
)
def test_a_bug_of_one_rank_is_its_own_and_not_that_of_those_it_left(
    failed: dict[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would come back, so nothing is started again."""
    fail_as_rank(RuntimeError("gloo: connection closed by peer"), 0, tmp_path, monkeypatch)
    fail_as_rank(ZeroDivisionError("division by zero"), 1, tmp_path, monkeypatch)
    error = failure(tmp_path, failed)
    assert isinstance(error, RankFailed) and not isinstance(error, RankDied)
    assert str(error).startswith("rank 1 failed (ZeroDivisionError: division by zero); its output is in ")


def test_a_rank_that_ended_before_its_work_began_is_blamed_before_those_it_left(tmp_path: Path) -> None:
    write_json(tmp_path / "lost-0.json", {"lost": "gloo: connection closed by peer"})
    error = failure(tmp_path, {0: USER_ERROR, 1: BUG})
    assert not isinstance(error, RankDied) and "rank 1 ended with exit code 1" in str(error)


def test_a_rank_that_was_killed_is_blamed_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_as_rank(ZeroDivisionError("of what it got from rank 2"), 0, tmp_path, monkeypatch)
    error = failure(tmp_path, {0: BUG, 2: -9})
    assert isinstance(error, RankDied) and "rank 2 was killed by signal 9" in str(error)


def test_ranks_that_lost_each_other_may_start_again(tmp_path: Path) -> None:
    for rank in (0, 1):
        write_json(tmp_path / f"lost-{rank}.json", {"lost": f"reset of {rank}"})
    error = failure(tmp_path, {0: USER_ERROR, 1: USER_ERROR})
    assert isinstance(error, RankDied) and "rank 0 lost the other ranks (reset of 0)" in str(error)


# --- verdicts

HUNG = HangVerdict(cause="slow_rank", rank=1, text="rank 1 computes at train.py:3; look at that line")


class FakeWatcher:
    """A verdict at its second look, which is over at its fourth."""

    def __init__(self) -> None:
        self.looks = 0
        self.verdict: HangVerdict | None = None

    def poll(self) -> HangVerdict | None:
        self.looks += 1
        self.verdict = HUNG if self.looks in (2, 3) else None
        return HUNG if self.looks == 2 else None


class FakeRanks:
    """Ranks that end in order after five looks of the watcher."""

    def __init__(self, watcher: FakeWatcher) -> None:
        self.watcher, self.was_killed = watcher, False

    def killed(self) -> dict[int, int]:
        return {}

    def has_ended(self) -> bool:
        return self.watcher.looks >= 5

    def failures(self) -> dict[int, int]:
        return {}

    def kill(self) -> None:
        self.was_killed = True


def wait(ranks: FakeRanks, watch: HangWatch, forwarded: list[int]) -> dict[int, int]:
    return launching._wait(ranks, watch, lambda ranks: None, forwarded)  # type: ignore[arg-type]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> FakeRanks:
    watcher = FakeWatcher()
    monkeypatch.setattr(launching, "_watcher", lambda *_: watcher)
    monkeypatch.setattr(launching, "POLL_S", 0.0)
    return FakeRanks(watcher)


@pytest.mark.parametrize(("forwarded", "error"), [([], RunHung), ([2], KeyboardInterrupt)])
def test_a_run_that_hangs_is_not_restarted_after_ctrl_c(
    forwarded: list[int], error: type[BaseException], ranks: FakeRanks, tmp_path: Path
) -> None:
    watch = HangWatch(folder=tmp_path, on_hang="restart", say=lambda text: None)
    with pytest.raises(error):
        wait(ranks, watch, forwarded)
    verdict = read_verdict(tmp_path)
    assert ranks.was_killed and verdict is not None and not verdict.resolved
    assert [event.event for event in read_events(tmp_path)] == ["failed"]


def test_a_verdict_is_taken_back_when_the_run_goes_on(ranks: FakeRanks, tmp_path: Path) -> None:
    said: list[str] = []
    assert wait(ranks, HangWatch(folder=tmp_path, on_hang="wait", say=said.append), []) == {}
    verdict = read_verdict(tmp_path)
    assert verdict is not None and verdict.resolved
    assert said[1] == "the run goes on: rank 1 computes at train.py:3 no more"


@pytest.mark.parametrize(
    ("sent", "passed_on"),
    [
        ([signal.SIGTERM, signal.SIGTERM], [signal.SIGTERM, signal.SIGTERM]),
        ([signal.SIGINT, signal.SIGINT], [signal.SIGTERM, signal.SIGINT]),
        ([signal.SIGTERM, signal.SIGINT], [signal.SIGTERM, signal.SIGINT]),
    ],
)
def test_only_a_second_ctrl_c_ends_ranks_at_once(sent: list[int], passed_on: list[int]) -> None:
    got: list[int] = []
    with launching._forwarding_signals(SimpleNamespace(signal=got.append)):  # type: ignore[arg-type]
        for number in sent:
            os.kill(os.getpid(), number)
            time.sleep(0)  # handlers run between two instructions
    assert got == passed_on
