"""Start the ranks of a run on this machine: torchrun's own processes, with one line at the end instead of tracebacks.

Ctrl-C and SIGTERM are passed on to every rank, which save and end by themselves. A rank that fails takes the others
down; the first that had something to say is quoted.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from armillary.cli.train.rank_processes import POLL_S, SIGNALS, Place, RankProcesses
from armillary.cli.train.restarts import Restarts
from armillary.errors import ArmillaryError
from armillary.spec.tables.train import OnHang
from armillary.store import nan_safe_json
from armillary.store.hang_verdict import HangVerdict, resolve_verdict, write_verdict
from armillary.store.run_events import add_event

if TYPE_CHECKING:
    from armillary.training.resilience.watcher import Watcher

Meanwhile = Callable[[RankProcesses], None]
"""called while ranks run; may raise what ends them"""


class RankFailed(ArmillaryError):
    """A rank ended with this error."""


class RankDied(RankFailed):
    """A rank was killed, or lost the others: the next start may go well."""


class RunHung(ArmillaryError):
    """The ranks stood still and were ended; the message is the verdict."""


class EndRanks(ArmillaryError):
    """Raised by what is called meanwhile: the ranks must end, for a reason that is not theirs."""


@dataclass(frozen=True, kw_only=True)
class HangWatch:
    """How the launcher watches the ranks of a run: its folder, what follows a verdict, and who says it."""

    folder: Path
    on_hang: OnHang
    say: Callable[[str], None]
    remote_data: bool = False


@dataclass(frozen=True, kw_only=True)
class Launched:
    """The outcome that the main rank wrote, empty where it was interrupted before, and whether a signal was passed
    on."""

    outcome: dict[str, Any]
    interrupted: bool


def launch(
    program: str,
    task: Mapping[str, Any],
    *,
    num_ranks: int,
    threads: int | None,
    logs: Path,
    then: str = "the same command continues from the last checkpoint",
    restarts: Restarts | None = None,
    watch: HangWatch | None = None,
) -> Launched:
    """Run `python -m PROGRAM TASK` as ranks of one machine, and wait for them. The main rank shows what it does; what
    others print goes to `logs`. `threads` are those of a rank that computes on the CPU; `then` is what to do when one
    fails. Where a rank dies, or with `watch` where they stand still, all are started again as long as `restarts`
    allows."""
    while True:
        try:
            return launch_once(program, task, Place.alone(num_ranks), threads, logs, then=then, watch=watch)
        except (RankDied, RunHung) as error:
            ends = isinstance(error, RunHung) and watch is not None and watch.on_hang != "restart"
            if ends or restarts is None or not restarts.allows(str(error).partition(";")[0]):
                raise


def launch_once(
    program: str,
    task: Mapping[str, Any],
    place: Place,
    threads: int | None,
    logs: Path,
    *,
    then: str = "the same command continues from the last checkpoint",
    watch: HangWatch | None = None,
    meanwhile: Meanwhile = lambda ranks: None,
) -> Launched:
    """The same for the ranks of one machine among several, without restarts."""
    with tempfile.TemporaryDirectory(prefix="armillary-ranks-") as folder:
        logs.mkdir(parents=True, exist_ok=True)
        text = nan_safe_json.dumps({**task, "answers": folder, "logs": str(logs), "parent": os.getpid()})
        ranks = RankProcesses(program, text, place, threads, folder)
        with _forwarding_signals(ranks) as forwarded:
            failed = _wait(ranks, watch, meanwhile, forwarded)
        outcome, interrupted = Path(folder, "outcome.json"), bool(forwarded)
        if outcome.is_file():
            return Launched(outcome=nan_safe_json.read_table(outcome), interrupted=interrupted)
        if failed:
            raise _failure(Path(folder), failed, logs, then, interrupted=interrupted)
        return Launched(outcome={}, interrupted=interrupted)


@contextmanager
def _forwarding_signals(ranks: RankProcesses) -> Iterator[list[int]]:
    """Signals go to every rank: the first asks them to save and end, a second Ctrl-C to end at once. A second SIGTERM
    does not: schedulers send it to every process of a job, and a parent may pass it on as well."""
    forwarded: list[int] = []

    def forward(number: int, frame: Any) -> None:
        kind = signal.SIGINT if forwarded and number == signal.SIGINT else signal.SIGTERM
        forwarded.append(number)
        ranks.signal(kind)

    before = {number: signal.signal(number, forward) for number in SIGNALS}
    try:
        yield forwarded
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(
    ranks: RankProcesses, watch: HangWatch | None, meanwhile: Meanwhile, forwarded: Sequence[int] = ()
) -> dict[int, int]:
    """Rank -> exit code of those that failed, once all have ended; `forwarded` are signals that were passed on."""
    watcher = _watcher(ranks, watch) if watch is not None else None
    while not (killed := ranks.killed()) and not ranks.has_ended():
        time.sleep(POLL_S)
        verdict = _poll(watcher, watch) if watcher is not None and watch is not None else None
        if verdict is not None and watch is not None and watch.on_hang != "wait":
            add_event(watch.folder, "failed")
            ranks.kill()
            raise KeyboardInterrupt if forwarded else RunHung(verdict.text)  # who stops it does not restart it
        try:
            meanwhile(ranks)
        except BaseException:
            ranks.end_survivors()
            raise
    if killed:
        if watch is not None:
            add_event(watch.folder, "failed")  # now: what follows is a part of the restart
        ranks.end_survivors()
        if watcher is not None and watch is not None and (verdict := watcher.judge_ended(killed)) is not None:
            _tell(verdict, watch)
        return killed
    return ranks.failures()


def _watcher(ranks: RankProcesses, watch: HangWatch) -> Watcher:
    from armillary.training.resilience.rank_heartbeat import HeartbeatBoard, board_name
    from armillary.training.resilience.watcher import Watcher

    place = ranks.place
    board, crashes = HeartbeatBoard(place.store, board_name(watch.folder, "0")), watch.folder / "logs"
    return Watcher(board, place.world, remote_data=watch.remote_data, pids=ranks.pids, crashes=crashes)


def _poll(watcher: Watcher, watch: HangWatch) -> HangVerdict | None:
    """A new verdict, which is told; also tells that the run goes on after one."""
    before = watcher.verdict
    if (verdict := watcher.poll()) is not None:
        _tell(verdict, watch)
    elif before is not None and watcher.verdict is None:
        watch.say(before.goes_on)
        resolve_verdict(watch.folder)
    return verdict


def _tell(verdict: HangVerdict, watch: HangWatch) -> None:
    """Print and write a verdict; the disk may be the reason for it."""
    watch.say("\n".join(verdict.lines))
    with suppress(ArmillaryError, OSError):
        write_verdict(watch.folder, verdict)


def _failure(folder: Path, failed: Mapping[int, int], logs: Path, then: str, *, interrupted: bool) -> BaseException:
    """What to tell: the line a rank left, the lowest rank's first; else how the rank ended."""
    if said := _left_by_ranks(folder, "error"):
        return RankFailed(next(iter(said.values())))
    if interrupted:
        return KeyboardInterrupt()
    lost, bugs = _left_by_ranks(folder, "lost"), _left_by_ranks(folder, "bug")
    killed = {rank: code for rank, code in failed.items() if code < 0}  # who was killed is why others failed
    if bugs and not killed:
        rank, text = min(bugs.items())
        return RankFailed(f"rank {rank} failed ({text}); {_output_of(rank, logs)}, and {then}")
    rank, code = min((killed or failed).items(), key=lambda item: (item[0] in lost, item[0]))
    if rank in lost and code >= 0:
        return RankDied(f"rank {rank} lost the other ranks ({lost[rank]}); see {logs}, and train again")
    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    why = " (the system kills what needs too much memory)" if code == -signal.SIGKILL else ""
    kind = RankDied if code < 0 else RankFailed
    return kind(f"rank {rank} {how}{why}; {_output_of(rank, logs)}, and {then}")


def _left_by_ranks(folder: Path, kind: str) -> dict[int, str]:
    """Rank -> what it left in a file of this kind (see rank.py)."""
    paths = {int(path.stem.partition("-")[2]): path for path in folder.glob(f"{kind}-*.json")}
    return {rank: nan_safe_json.read_table(path)[kind] for rank, path in sorted(paths.items())}


def _output_of(rank: int, logs: Path) -> str:
    return "its output is above" if rank == 0 else f"its output is in {logs}/rank-{rank}.log"
