"""Start the ranks of a run on this machine: torchrun's own processes, with one line at the end instead of tracebacks.

Ctrl-C and SIGTERM are passed on to every rank, which save and end by themselves. A rank that fails takes the others
down; the first that had something to say is quoted.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from armillary.cli.train.restarts import Restarts
from armillary.errors import ArmillaryError
from armillary.spec.tables.train import OnHang
from armillary.store import nan_safe_json
from armillary.store.hang_verdict import HangVerdict, write_verdict
from armillary.store.run_events import add_event

if TYPE_CHECKING:
    from armillary.training.resilience.watcher import Watcher

POLL_S = 0.1
SURVIVORS_S = 5.0
"""for ranks to end by themselves after another was killed: their collectives fail at once with gloo, and never with
a device that waits"""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class RankFailed(ArmillaryError):
    """A rank ended with this error."""


class RankDied(RankFailed):
    """A rank was killed, or lost the others: the next start may go well."""


class RunHung(ArmillaryError):
    """The ranks stood still and were ended; the message is the verdict."""


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
            return _launch_once(program, task, num_ranks, threads, logs, then, watch)
        except (RankDied, RunHung) as error:
            ends = isinstance(error, RunHung) and watch is not None and watch.on_hang != "restart"
            if ends or restarts is None or not restarts.allows(str(error).partition(";")[0]):
                raise


def _launch_once(
    program: str,
    task: Mapping[str, Any],
    num_ranks: int,
    threads: int | None,
    logs: Path,
    then: str,
    watch: HangWatch | None,
) -> Launched:
    with tempfile.TemporaryDirectory(prefix="armillary-ranks-") as folder:
        logs.mkdir(parents=True, exist_ok=True)
        text = nan_safe_json.dumps({**task, "answers": folder, "logs": str(logs), "parent": os.getpid()})
        ranks = _start(program, text, num_ranks, threads, folder)
        with _forwarding_signals(ranks) as forwarded:
            failed = _wait(ranks, watch)
        outcome, interrupted = Path(folder, "outcome.json"), bool(forwarded)
        if outcome.is_file():
            return Launched(outcome=nan_safe_json.read_table(outcome), interrupted=interrupted)
        if failed:
            raise _failure(Path(folder), failed, logs, then, interrupted=interrupted)
        return Launched(outcome={}, interrupted=interrupted)


def _start(program: str, task: str, num_ranks: int, threads: int | None, folder: str) -> Any:
    from torch.distributed import TCPStore
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes

    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)  # we say how it ended
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": "armillary",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCH_FR_BUFFER_SIZE": "256",  # torch records the last collectives, for the verdict on a hang
    }
    if threads is not None:
        common |= {"OMP_NUM_THREADS": str(threads), "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0"}
    envs = {n: {**common, "RANK": str(n), "LOCAL_RANK": str(n)} for n in range(num_ranks)}
    before = {number: signal.getsignal(number) for number in (*_SIGNALS, signal.SIGQUIT)}
    try:
        ranks = start_processes(
            name="rank",
            entrypoint=sys.executable,
            args={n: ("-m", program, task) for n in range(num_ranks)},
            envs=envs,
            logs_specs=DefaultLogsSpecs(folder),
        )
    finally:
        for number, handler in before.items():  # torch takes the signals; they are forwarded here
            signal.signal(number, handler)
    ranks.store = store  # the ranks meet there: it lives as long as they do
    return ranks


@contextmanager
def _forwarding_signals(ranks: Any) -> Iterator[list[int]]:
    """Signals go to every rank: the first asks them to save and end, the second to end at once."""
    forwarded: list[int] = []

    def forward(number: int, frame: Any) -> None:
        forwarded.append(number)
        for pid in ranks.pids().values():
            with suppress(ProcessLookupError):  # it may have ended by itself
                os.kill(pid, signal.SIGTERM)

    before = {number: signal.signal(number, forward) for number in _SIGNALS}
    try:
        yield forwarded
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(ranks: Any, watch: HangWatch | None = None) -> dict[int, int]:
    """Rank -> exit code of those that failed, once all have ended."""
    watcher = _watcher(ranks, watch) if watch is not None else None
    while not (killed := _killed(ranks)) and not _has_ended(ranks):
        time.sleep(POLL_S)
        if watcher is not None and watch is not None and (verdict := watcher.poll()) is not None:
            _tell(verdict, watch)
            if watch.on_hang != "wait":
                add_event(watch.folder, "failed")
                ranks.close(death_sig=signal.SIGKILL, timeout=10)  # a rank in a collective reacts to nothing else
                raise RunHung(verdict.text)
    if killed:
        if watch is not None:
            add_event(watch.folder, "failed")  # now: what follows is a part of the restart
        _end_survivors(ranks)
        if watcher is not None and watch is not None and (verdict := watcher.judge_ended(killed)) is not None:
            _tell(verdict, watch)
        return killed
    result = ranks.wait(timeout=POLL_S, period=POLL_S)
    assert result is not None, "a rank has ended"
    if not result.is_failed():
        return {}
    first = {rank: failure.exitcode for rank, failure in result.failures.items()}
    ranks.close(death_sig=signal.SIGTERM, timeout=10)
    codes = first | {rank: handler.proc.poll() or 0 for rank, handler in ranks.subprocess_handlers.items()}
    by_itself = {rank: code for rank, code in codes.items() if code not in (0, -signal.SIGTERM)}
    return by_itself or first  # the others were told to end


def _watcher(ranks: Any, watch: HangWatch) -> Watcher:
    from armillary.training.resilience.rank_heartbeat import HeartbeatBoard, board_name
    from armillary.training.resilience.watcher import Watcher

    board, pids = HeartbeatBoard(ranks.store, board_name(watch.folder, "0")), ranks.pids()
    return Watcher(board, len(pids), remote_data=watch.remote_data, pids=pids, crashes=watch.folder / "logs")


def _tell(verdict: HangVerdict, watch: HangWatch) -> None:
    """Print and write a verdict; the disk may be the reason for it."""
    watch.say("\n".join(verdict.lines))
    with suppress(ArmillaryError, OSError):
        write_verdict(watch.folder, verdict)


def _codes(ranks: Any) -> dict[int, int | None]:
    return {rank: handler.proc.poll() for rank, handler in ranks.subprocess_handlers.items()}


def _killed(ranks: Any) -> dict[int, int]:
    """Rank -> exit code of those that a signal ended."""
    return {rank: code for rank, code in _codes(ranks).items() if code is not None and code < 0}


def _has_ended(ranks: Any) -> bool:
    """Whether a rank has failed or all have ended."""
    codes = _codes(ranks).values()
    return any(codes) or all(code is not None for code in codes)


def _end_survivors(ranks: Any) -> None:
    end = time.monotonic() + SURVIVORS_S
    while None in _codes(ranks).values() and time.monotonic() < end:
        time.sleep(POLL_S)
    ranks.close(death_sig=signal.SIGKILL, timeout=10)


def _failure(folder: Path, failed: Mapping[int, int], logs: Path, then: str, *, interrupted: bool) -> BaseException:
    """What to tell: the line a rank left, the lowest rank's first; else how the rank ended."""
    said = sorted(folder.glob("error-*.json"), key=lambda path: int(path.stem.partition("-")[2]))
    if said:
        return RankFailed(nan_safe_json.read_table(said[0])["error"])
    if interrupted:
        return KeyboardInterrupt()
    rank, code = min(failed.items(), key=lambda item: (item[1] >= 0, item[0]))  # who was killed is why others failed
    lost = sorted(folder.glob("lost-*.json"))
    if lost and code >= 0:
        text = nan_safe_json.read_table(lost[0])["lost"]
        return RankDied(f"rank {rank} lost the other ranks ({text}); see {logs}, and train again")
    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    why = " (the system kills what needs too much memory)" if code == -signal.SIGKILL else ""
    where = "its output is above" if rank == 0 else f"its output is in {logs}/rank-{rank}.log"
    kind = RankDied if code < 0 else RankFailed
    return kind(f"rank {rank} {how}{why}; {where}, and {then}")
