"""A script's own profiler: ours is told in time, and theirs finds what it would have found."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.autograd import profiler

from armillary.profiling.record.user_profiler import UserProfiler


class Seen:
    def __init__(self) -> None:
        self.begins = 0
        self.theirs = UserProfiler(self.began)

    def began(self) -> None:
        assert not torch.autograd._profiler_enabled()
        self.begins += 1


@pytest.fixture
def seen() -> Iterator[Seen]:
    made, plain = Seen(), profiler._enable_profiler
    made.theirs.watch()
    yield made
    made.theirs.release()
    assert profiler._enable_profiler is plain


def test_each_of_theirs_is_told_once(seen: Seen) -> None:
    for expected in (1, 2):
        with torch.profiler.profile() as own:
            assert (seen.begins, seen.theirs.running) == (expected, True)
            torch.ones(2) + 1
        assert not seen.theirs.running
        assert any(row.key == "aten::add" for row in own.key_averages())


def test_a_schedule_is_told_when_it_warms_up(seen: Seen) -> None:
    running = []
    with torch.profiler.profile(schedule=torch.profiler.schedule(wait=1, warmup=1, active=1, repeat=1)) as own:
        for _ in range(4):
            running.append(seen.theirs.running)
            own.step()
    assert running == [False, True, True, False] and seen.begins == 1


def test_the_older_one_is_told(seen: Seen) -> None:
    with torch.autograd.profiler.profile():
        torch.ones(2) + 1
    assert seen.begins == 1 and seen.theirs.met


def test_ours_is_not_told(seen: Seen) -> None:
    with seen.theirs.ours():
        own = torch.profiler.profile()
        own.start()
    assert seen.begins == 0 and seen.theirs.running  # somebody's, in any case
    with seen.theirs.ours():
        own.stop()
    assert not seen.theirs.running and not seen.theirs.met
