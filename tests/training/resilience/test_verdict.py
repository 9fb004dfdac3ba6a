"""Why a run stands still, from hand-made heartbeats: each cause, and everything that is no hang."""

from __future__ import annotations

import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from armillary.store.hang_verdict import Collective, read_verdict, write_verdict
from armillary.store.writer_process import Process, machine
from armillary.training.resilience.rank_heartbeat import Heartbeat, HeartbeatBoard
from armillary.training.resilience.rank_progress import STEADY_STEPS, Progress
from armillary.training.resilience.verdict import FULL_BYTES, RankFacts, find_verdict, limit_s
from armillary.training.resilience.watcher import Watcher

REDUCE = Collective(kind="all_reduce", group="0", sequence=41, bytes=4096, line="armillary/parallel/ddp.py:88 (reduce)")


def beat(rank: int, **changes: Any) -> Heartbeat:
    """A rank inside step 7 that computes its backward pass."""
    usual: dict[str, Any] = {
        "count": 30,
        "pid": 1000 + rank,
        "born": 5,
        "host": "node7",
        "machine": "node7/boot/pid",
        "step": 7,
        "phase": "backward",
        "progress": 90,
        "is_steady": True,
        "step_s": 0.5,
        "lines": (f"train.py:{rank + 1} (step)",),
        "free_bytes": 10**12,
    }
    return Heartbeat(rank=rank, **usual | changes)


def fact(rank: int, *, stalled_s: float = 12.0, cpu: float = 0.01, **changes: Any) -> RankFacts:
    """A rank that waits in REDUCE; `changes` are of its heartbeat or of the facts."""
    of_facts = {name: changes.pop(name) for name in ("process", "exit_code", "silent_s") if name in changes}
    usual: dict[str, Any] = {"process": "sleeping", "silent_s": 0.5} | of_facts
    return RankFacts(
        rank=rank, beat=beat(rank, **{"collective": REDUCE} | changes), stalled_s=stalled_s, cpu_share=cpu, **usual
    )


def found(*facts: RankFacts, **options: Any) -> tuple[str, int] | None:
    verdict = find_verdict(facts, **options)
    return None if verdict is None else (verdict.cause, verdict.rank)


def test_a_dead_process_is_named_at_once_with_its_signal() -> None:
    dead = fact(1, stalled_s=1.0, process="gone", exit_code=-9, collective=None)
    verdict = find_verdict([fact(0, stalled_s=1.0), dead, fact(2, stalled_s=0.0)])
    assert verdict is not None and (verdict.cause, verdict.rank) == ("dead_process", 1)
    assert "killed by signal 9" in verdict.text and "train.py:2 (step)" in verdict.text
    assert verdict.collective == REDUCE and [place.rank for place in verdict.ranks] == [0, 1, 2]


def test_a_rank_of_another_machine_that_falls_silent_is_lost() -> None:
    gone = fact(1, process="unknown", silent_s=16.0)
    assert found(fact(0), gone) == ("dead_process", 1)
    assert found(fact(0, stalled_s=9.0), replace(gone, silent_s=9.0, stalled_s=9.0)) is None


def test_a_rank_that_has_ended_in_order_is_not_dead() -> None:
    assert found(fact(0, stalled_s=3.0), fact(1, process="gone", ended=True, collective=None)) is None


def test_a_stopped_process_is_told_from_one_that_pauses() -> None:
    stopped = fact(1, process="stopped", silent_s=8.5, collective=None)
    verdict = find_verdict([fact(0), stopped])
    assert verdict is not None and (verdict.cause, verdict.rank) == ("stopped_process", 1)
    assert "kill -CONT 1001" in verdict.text
    assert found(fact(0, stalled_s=3.0), replace(stopped, silent_s=3.0)) is None


def test_a_rank_in_another_collective_has_left_one_out() -> None:
    other = Collective(kind="broadcast", group="0", sequence=41, bytes=8, line="mine.py:5 (late)")
    verdict = find_verdict([fact(0), fact(1), fact(2, collective=other), fact(3)])
    assert verdict is not None and (verdict.cause, verdict.rank) == ("desync", 2)
    assert "broadcast of 8 bytes, number 41" in verdict.text and "mine.py:5" in verdict.text
    assert verdict.collective == REDUCE


def test_of_two_ranks_the_one_that_counted_fewer_left_one_out() -> None:
    fewer = replace(REDUCE, sequence=40, line="mine.py:9 (next)")
    assert found(fact(0), fact(1, collective=fewer)) == ("desync", 1)
    assert found(fact(0, collective=fewer), fact(1)) == ("desync", 0)
    further = replace(REDUCE, kind="broadcast")
    assert found(fact(0, collective=further, marks=8), fact(1)) == ("desync", 0)
    assert found(fact(0), fact(1, collective=further, marks=8)) == ("desync", 1), "as many, but further on"


def test_ranks_of_another_group_are_not_blamed() -> None:
    """Ranks 0 and 1 are one group, 2 and 3 another: rank 3 is where rank 2 does not expect it."""
    first = replace(REDUCE, group="1", members=(0, 1))
    second = replace(REDUCE, group="2", members=(2, 3))
    late = Collective(kind="barrier", group="0", sequence=4)
    facts = [fact(0, collective=late), fact(1, collective=late), fact(2, collective=second), fact(3, collective=late)]
    verdict = find_verdict(facts)
    assert verdict is not None and (verdict.cause, verdict.rank) == ("desync", 3)
    assert (
        found(fact(0, collective=first), fact(1, collective=first), *(fact(n, stalled_s=0.0) for n in (2, 3))) is None
    )


def test_a_rank_that_ended_while_others_wait_is_a_desync() -> None:
    assert found(fact(0), fact(1, ended=True, collective=None)) == ("desync", 1)


def test_all_in_the_same_collective_is_the_network() -> None:
    assert found(fact(0), fact(1)) == ("network", 0)


def test_a_slow_rank_is_one_that_others_wait_for() -> None:
    slow = fact(1, stalled_s=21.0, cpu=1.0, collective=None)
    verdict = find_verdict([fact(0, stalled_s=21.0), slow])
    assert verdict is not None and (verdict.cause, verdict.rank) == ("slow_rank", 1)
    assert "computes at train.py:2 (step) for 21 s" in verdict.text
    assert found(fact(0, stalled_s=15.0), replace(slow, stalled_s=15.0)) is None, "a busy machine is slow"
    assert found(fact(0, stalled_s=40.0), fact(1, stalled_s=40.0, cpu=1.0, collective=None, step_s=5.0)) is None


def test_a_data_loader_that_returns_nothing() -> None:
    stuck = fact(1, stalled_s=19.0, collective=None, in_loader=True, phase="data", loader_line="source.py:3 (read)")
    verdict = find_verdict([fact(0, stalled_s=19.0), stuck])
    assert verdict is not None and (verdict.cause, verdict.rank) == ("stuck_data_loader", 1)
    assert "source.py:3 (read)" in verdict.text
    assert found(fact(0, stalled_s=19.0), stuck, remote_data=True) is None, "a store may be slow"


def test_a_full_disk_is_why_a_rank_does_not_get_on() -> None:
    full = fact(1, stalled_s=130.0, phase="save", is_steady=False, collective=None, free_bytes=FULL_BYTES - 1)
    assert found(fact(0, stalled_s=130.0, is_steady=False), full) == ("full_disk", 1)
    assert found(fact(0, stalled_s=130.0, is_steady=False), replace(full, beat=beat(1, is_steady=False))) == (
        "slow_rank",
        1,
    )


@pytest.mark.parametrize(
    ("changes", "stalled_s", "cpu"),
    [
        ({"is_steady": False, "phase": "setup", "collective": None}, 500.0, 1.0),
        ({"is_steady": False, "phase": "save", "collective": None}, 100.0, 0.0),
        ({"is_steady": False, "phase": "save", "collective": None, "process": "disk"}, 500.0, 0.0),
        ({"on_gpu": True, "step_s": 9.0, "collective": None}, 80.0, 0.0),
    ],
    ids=["compiles", "uploads", "syncs to disk", "waits for its GPU"],
)
def test_what_takes_long_is_no_hang(changes: dict[str, Any], stalled_s: float, cpu: float) -> None:
    busy = fact(0, stalled_s=stalled_s, cpu=cpu, **changes)
    assert limit_s(busy) > stalled_s and found(busy, fact(1, stalled_s=stalled_s)) is None


def test_one_process_that_computes_is_never_judged() -> None:
    assert found(fact(0, stalled_s=300.0, cpu=1.0, collective=None)) is None
    assert found(fact(0, stalled_s=300.0, cpu=0.0, collective=None)) == ("slow_rank", 0)


def test_ranks_that_wait_at_a_store_barrier_do_not_hide_one_that_hangs() -> None:
    waits = fact(0, stalled_s=3.0, collective=None, in_barrier=True)
    outside: dict[str, Any] = {"is_steady": False, "phase": "save", "collective": None}
    assert found(waits, fact(1, stalled_s=130.0, **outside)) == ("slow_rank", 1)
    assert found(waits, fact(1, stalled_s=100.0, **outside)) is None
    assert found(waits, replace(waits, rank=1)) is None
    writes = fact(2, stalled_s=700.0, **outside, is_writing=True)
    verdict = find_verdict([waits, fact(1, stalled_s=700.0, **outside), writes])
    assert verdict is not None and verdict.text.startswith("rank 2 waits for the disk at train.py:3")
    assert found(waits, replace(writes, stalled_s=500.0)) is None, "a slow disk"


def test_a_verdict_is_read_back_as_written(tmp_path: Path) -> None:
    verdict = find_verdict([fact(0), fact(1, process="gone", collective=None)])
    assert verdict is not None and read_verdict(tmp_path) is None
    write_verdict(tmp_path, verdict)
    assert read_verdict(tmp_path) == verdict
    assert len(verdict.lines) == 3 and "in all_reduce of 4,096 bytes, number 41 of group 0" in verdict.lines[1]


# --- the watcher: by its own clock, with real processes


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_process_that_is_stopped_and_then_killed() -> None:
    """A process with heartbeats: alive, stopped, continued, dead; seconds pass by a clock of the test's."""
    child = subprocess.Popen(["sleep", "60"])
    clock, board = Clock(), HeartbeatBoard(dist.HashStore(), "run/0")
    born = int(Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19])
    alive = beat(0, pid=child.pid, born=born, machine=machine(), host=Process.this().host)
    watcher = Watcher(board, 1, clock=clock)

    def pass_s(seconds: int, *, beats: bool) -> list[str]:
        causes = []
        for _ in range(seconds):
            clock.now += 1.0
            if beats:
                nonlocal alive
                alive = replace(alive, count=alive.count + 1, progress=alive.progress + 1)
                board.write(alive)
            verdict = watcher.poll()
            causes += [verdict.cause] if verdict else []
        return causes

    try:
        assert pass_s(30, beats=True) == []
        child.send_signal(signal.SIGSTOP)
        assert pass_s(7, beats=False) == []
        assert pass_s(5, beats=False) == ["stopped_process"], "once"
        child.send_signal(signal.SIGCONT)
        assert pass_s(3, beats=True) == [] and watcher.verdict is None, "it goes on"
        child.kill()
        child.wait()
        assert pass_s(3, beats=False) == ["dead_process"]
    finally:
        child.kill()
        child.wait()


def test_a_watcher_that_was_stopped_itself_starts_over() -> None:
    clock, board = Clock(), HeartbeatBoard(dist.HashStore(), "run/0")
    board.write(beat(0, collective=REDUCE))
    watcher = Watcher(board, 1, clock=clock)
    for _ in range(8):
        clock.now += 1.0
        assert watcher.poll() is None
    clock.now += 3600.0
    assert watcher.poll() is None and watcher.facts[0].stalled_s < 1.0


def test_progress_knows_how_long_a_step_takes() -> None:
    clock = Clock()
    progress = Progress(clock)
    assert progress.phase == "setup" and not progress.is_steady
    for _ in range(STEADY_STEPS + 1):
        progress.start_step()
        progress.mark("backward")
        clock.now += 2.0
    assert progress.is_steady and progress.step_s == 2.0
    before = progress.marks
    progress.mark("save")
    clock.now += 500.0
    progress.start_step()
    assert progress.step_s == 2.0 and progress.marks == before + 2, "a save is no step"
