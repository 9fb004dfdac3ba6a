"""An outside process that strikes a training at random times and knows nothing of the run.

    python -m tests.attacker ACTION PID SEED COUNT GAP_S FOLDER

Gaps are drawn uniformly from 0 to GAP_S; the first begins when launcher PID has ranks. Each strike is printed as a line
of JSON with what it met: the time, the rank, and whether a save was under way in FOLDER.

    kill    SIGKILL to one rank              power   SIGKILL to the launcher and all ranks at once
    save    as power, but only while a checkpoint is being written
    stop    SIGSTOP to one rank              fill    no space for checkpoints until the launcher has ended: FOLDER, a
                                                     file system of its own, is filled; where it is none, a limit is
                                                     set on the files of the processes that write checkpoints
"""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

ACTIONS = ("kill", "power", "save", "stop", "fill")
FILLER = "filler"
_RANK = b"armillary.cli.train.rank", b"tests.fork_server"
_WRITER = (b"shard_writer_process",)


def attack(action: str, launcher: int, seed: int, count: int, gap_s: float, folder: Path) -> None:
    draw = random.Random(seed)
    wait_for_ranks(launcher)
    for _ in range(count):
        time.sleep(draw.uniform(0, gap_s))
        ranks = wait_for_ranks(launcher)
        if not ranks or (action == "save" and not wait_for_save(launcher, folder)):
            return
        number = draw.randrange(len(ranks))
        struck = {"time": time.time(), "rank": number, "action": action, "saving": is_saving(folder)}
        try:
            _strike(action, launcher, ranks, number, folder)
        except ProcessLookupError:
            continue  # it has just ended
        print(json.dumps(struck), flush=True)


def _strike(action: str, launcher: int, ranks: list[int], number: int, folder: Path) -> None:
    if action in ("power", "save"):
        for pid in (launcher, *ranks):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    elif action == "fill":
        _fill(folder, launcher) if folder.is_mount() else _limit(launcher)
    else:
        os.kill(ranks[number], signal.SIGKILL if action == "kill" else signal.SIGSTOP)


def _fill(folder: Path, launcher: int) -> None:
    """What the run frees meanwhile is taken as well."""
    with open(folder / FILLER, "wb", buffering=0) as file:
        while is_alive(launcher):
            try:
                file.write(bytes(65536))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                time.sleep(0.005)


def _limit(launcher: int) -> None:
    while is_alive(launcher):
        for pid in [writer for rank in ranks_of(launcher) for writer in children(rank, _WRITER)]:
            with suppress(OSError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (4096, 4096))
        time.sleep(0.005)


def is_saving(folder: Path) -> bool:
    """Whether a checkpoint is being written."""
    return next(folder.glob("**/checkpoints/.*"), None) is not None


def wait_for_save(launcher: int, folder: Path) -> bool:
    """Whether one began before the launcher has ended."""
    while not (saving := is_saving(folder)) and is_alive(launcher):
        time.sleep(0.001)
    return saving


def wait_for_ranks(launcher: int) -> list[int]:
    """None where the launcher has ended."""
    while not (ranks := ranks_of(launcher)) and is_alive(launcher):
        time.sleep(0.01)
    return ranks


def ranks_of(launcher: int) -> list[int]:
    """Ranks of a launcher that are alive, in order."""
    return children(launcher, _RANK)


def children(parent: int, names: tuple[bytes, ...]) -> list[int]:
    """Live children of a process whose command line has one of these names."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            status, line = (folder / "stat").read_text(), (folder / "cmdline").read_bytes()
        except OSError:
            continue  # it has ended
        state, above = status.rpartition(")")[2].split()[:2]
        if int(above) == parent and state != "Z" and any(name in line for name in names):
            found.append(int(folder.name))
    return sorted(found)


def is_alive(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


if __name__ == "__main__":
    attack(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]), Path(sys.argv[6]))
