"""The watcher: reads the heartbeats of all ranks once a second, and says why where the run stands still.

It runs in the launcher, which outlives any rank, or in the heartbeat thread of the lowest live rank where torchrun or
srun started the ranks. `train.on_hang` says what follows a verdict: the ranks end (exit, restart) or go on (wait).
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from armillary.errors import ArmillaryError
from armillary.parallel.world import World
from armillary.spec.plan import Plan
from armillary.spec.tables.train import OnHang
from armillary.store.hang_verdict import HangVerdict, resolve_verdict, write_verdict
from armillary.store.remote import is_url
from armillary.store.runs import Run
from armillary.store.writer_process import machine
from armillary.training.resilience.process_facts import ProcessState, process_state, tree_runnable_s
from armillary.training.resilience.rank_heartbeat import BEAT_S, Heartbeat, HeartbeatBoard, HeartbeatSender, board_of
from armillary.training.resilience.source_lines import crash_lines, dumping_crashes
from armillary.training.resilience.verdict import SILENT_S, RankFacts, find_verdict

PAUSED_S = 5.0
"""a watcher that was not called for so long was itself stopped or starved, and begins again"""
AGREES = 2
"""looks in a row that must come to the same verdict: a process may be ending just now"""
_CPU_AFTER_S = 2.0
EXIT_CODE = 2


class Hung(ArmillaryError):
    """A run that stood still was ended; the message is the verdict."""


@dataclass
class _Seen:
    """What a watcher remembers of a rank, by its own clock."""

    beat: Heartbeat | None = None
    heard: float = 0.0
    progressed: float = 0.0
    cpu: tuple[float, float] | None = None  # (time, CPU seconds) soon after it last made progress


@dataclass
class Watcher:
    """`poll()` once in a while; gives a verdict once, when the run stands still. `pids` are those of a launcher's own
    ranks."""

    board: HeartbeatBoard
    num_ranks: int
    remote_data: bool = False
    pids: Mapping[int, int] = field(default_factory=dict)
    crashes: Path = Path()  # folder of what crashed processes left
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._polled = self.clock()
        self._begin(self._polled)
        self.verdict: HangVerdict | None = None
        self.facts: list[RankFacts] = []

    def _begin(self, now: float) -> None:
        self._seen = {rank: _Seen(heard=now, progressed=now) for rank in range(self.num_ranks)}
        self._agreed: tuple[str, int, int] = ("", -1, 0)

    def poll(self) -> HangVerdict | None:
        """A new verdict, or None. After one, None until the run has gone on and stands still again."""
        now = self.clock()
        if now - self._polled < 0.9 * BEAT_S:
            return None
        if now - self._polled > PAUSED_S:
            self._begin(now)
        self._polled = now
        self.facts = self.look(now)
        verdict = find_verdict(self.facts, remote_data=self.remote_data)
        cause, rank, times = self._agreed
        key = (verdict.cause, verdict.rank) if verdict else ("", -1)
        self._agreed = (*key, times + 1 if key == (cause, rank) else 1)
        if verdict is None:
            self.verdict = None
        elif self.verdict is None and self._agreed[2] >= AGREES:
            self.verdict = verdict
            return verdict
        return None

    def look(self, now: float) -> list[RankFacts]:
        beats = self.board.read_all(self.num_ranks)
        return [self._facts(rank, beat, now) for rank, beat in enumerate(beats)]

    def judge_ended(self, codes: Mapping[int, int]) -> HangVerdict | None:
        """The verdict on ranks that a launcher has seen end, with the last heartbeats of all."""
        return find_verdict([self._ended(each, codes) for each in self.look(self.clock())])

    def _ended(self, fact: RankFacts, codes: Mapping[int, int]) -> RankFacts:
        if fact.rank not in codes:
            return replace(fact, process="unknown", silent_s=0.0)  # it ended because of the others, if it did
        lines = crash_lines(self.crashes / f"crash-{fact.rank}.txt")
        return replace(fact, process="gone", exit_code=codes[fact.rank], crash_lines=lines)

    def _facts(self, rank: int, beat: Heartbeat | None, now: float) -> RankFacts:
        seen = self._seen[rank]
        if beat is not None:
            if seen.beat is None or beat.count != seen.beat.count or beat.pid != seen.beat.pid:
                seen.heard = now
            if seen.beat is None or (beat.progress, beat.pid) != (seen.beat.progress, seen.beat.pid):
                seen.progressed, seen.cpu = now, None
            seen.beat = beat
        process = self._process(rank, beat)
        return RankFacts(
            rank=rank,
            beat=beat,
            silent_s=now - seen.heard,
            stalled_s=now - seen.progressed,
            cpu_share=self._cpu_share(rank, seen, now),
            process=process,
        )

    def _process(self, rank: int, beat: Heartbeat | None) -> ProcessState:
        """Known only of processes on the same machine."""
        if beat is not None and beat.machine == machine():
            return process_state(beat.pid, beat.born)
        return process_state(self.pids[rank]) if rank in self.pids else "unknown"

    def _cpu_share(self, rank: int, seen: _Seen, now: float) -> float:
        """Since soon after it last made progress; 0 where that was a moment ago."""
        if seen.beat is None or now - seen.progressed < _CPU_AFTER_S:
            return 0.0
        here = seen.beat.machine == machine()
        used = tree_runnable_s(seen.beat.pid, writers=not seen.beat.in_step) if here else seen.beat.runnable_s
        if seen.cpu is None:
            seen.cpu = (now, used)
        since, before = seen.cpu
        return max(0.0, used - before) / (now - since) if now > since else 0.0


class RankWatch:
    """For ranks without a launcher of ours: called in the heartbeat thread after each beat. The lowest live rank
    watches; all ranks read its verdict, and end where `on_hang` says so."""

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        board: HeartbeatBoard,
        folder: Path,
        *,
        on_hang: OnHang,
        say: Callable[[str], None],
        failed: Callable[[HangVerdict], None] = lambda verdict: None,
        remote_data: bool = False,
    ) -> None:
        """`failed(verdict)` is called by the rank that watches before it ends."""
        self.rank, self.num_ranks, self.board, self.folder = rank, num_ranks, board, folder
        self.on_hang, self.say, self.failed = on_hang, say, failed
        self.verdict: HangVerdict | None = None
        self.ended = threading.Event()
        self._remote = remote_data
        self._watcher: Watcher | None = None
        self._lower: dict[int, tuple[int, float, Heartbeat]] = {}
        self._main: Heartbeat | None = None

    def __call__(self, beat: Heartbeat | None) -> None:
        if beat is None:
            return self._without_store()
        if (verdict := self.board.verdict()) is not None and not verdict.resolved:
            self._end(verdict)
        if not self._is_lowest():
            return
        if self._watcher is None:
            self._watcher = Watcher(self.board, self.num_ranks, remote_data=self._remote)
        before = self._watcher.verdict
        if (verdict := self._watcher.poll()) is not None:
            self._tell(verdict)
        elif before is not None and self._watcher.verdict is None:
            self._resolve(before)

    def _is_lowest(self) -> bool:
        """Whether every lower rank is gone or silent; only the lowest live one is read each second."""
        now = time.monotonic()
        for lower in range(self.rank):
            beat = self.board.read(lower)
            if beat is None:
                return False
            if lower == 0:
                self._main = beat
            count, heard, _ = self._lower.get(lower, (-1, now, beat))
            heard = now if beat.count != count else heard
            self._lower[lower] = (beat.count, heard, beat)
            if not beat.ended and now - heard < SILENT_S and _state(beat) not in ("gone", "stopped"):
                return False
        return True

    def _without_store(self) -> None:
        """The store is in the main rank's process where srun started the ranks: that one may be gone or stopped."""
        beat = self._main
        if beat is None or _state(beat) not in ("gone", "stopped"):
            return
        fact = RankFacts(rank=0, beat=beat, silent_s=SILENT_S, stalled_s=SILENT_S, process=_state(beat))
        if self.verdict is None and (verdict := find_verdict([fact])) is not None:
            self.verdict = verdict
            with suppress(ArmillaryError, OSError):
                write_verdict(self.folder, verdict)
            if self.rank == 1:
                self.say("\n".join(verdict.lines))
            self._end(verdict)

    def _tell(self, verdict: HangVerdict) -> None:
        with suppress(ArmillaryError, OSError):  # the disk may be full
            write_verdict(self.folder, verdict)
        self.say("\n".join(verdict.lines))
        if self.on_hang != "wait":
            self.failed(verdict)
        self.board.post(verdict)
        self._end(verdict)

    def _resolve(self, verdict: HangVerdict) -> None:
        self.say(verdict.goes_on)
        resolve_verdict(self.folder)
        self.board.post(replace(verdict, resolved=True))

    def _end(self, verdict: HangVerdict) -> None:
        """End this process: its main thread may be in a collective, which nothing interrupts. A process that is alone
        is interrupted instead."""
        self.verdict = verdict
        if self.on_hang == "wait":
            return
        if self.num_ranks > 1:
            os._exit(EXIT_CODE)
        main = threading.main_thread()
        for _ in range(2):  # the first asks to stop after the step, the second stops at once
            if not self.ended.is_set():
                signal.pthread_kill(main.ident or 0, signal.SIGINT)
                self.ended.wait(0.5)


def _state(beat: Heartbeat) -> ProcessState:
    return process_state(beat.pid, beat.born) if beat.machine == machine() else "unknown"


@contextmanager
def watched(
    plan: Plan, run: Run, world: World, say: Callable[[str], None], *, by_launcher: bool
) -> Iterator[HeartbeatSender]:
    """Send heartbeats of this rank, and watch those of all ranks where no launcher of ours does. The rank marks its
    progress on what is given; raises Hung where this process was ended by a verdict."""
    assert plan.train is not None
    board = board_of(world, run.folder)
    watch = RankWatch(
        world.rank,
        world.size,
        board,
        run.folder,
        on_hang=plan.train.on_hang,
        say=say,
        failed=lambda verdict: note_hang(run, verdict),
        remote_data=reads_remote(plan),
    )
    logs = run.folder / "logs"
    logs.mkdir(exist_ok=True)
    with (
        dumping_crashes(logs / f"crash-{world.rank}.txt"),
        HeartbeatSender(world, run.folder, board, _nothing if by_launcher else watch) as sender,
    ):
        try:
            yield sender
        except KeyboardInterrupt:
            if watch.verdict is None:
                raise
            raise Hung(watch.verdict.text) from None
        finally:
            watch.ended.set()


def note_hang(run: Run, verdict: HangVerdict) -> None:
    """Best effort, as the disk may be full."""
    with suppress(ArmillaryError, OSError):
        run.update(state="failed", error=verdict.text)


def reads_remote(plan: Plan) -> bool:
    """Whether batches come from a store, which may be slow."""
    return plan.data is not None and any(is_url(path) for path in (plan.data.path, *plan.data.paths))


def _nothing(beat: Heartbeat | None) -> None:
    """The launcher watches."""
