"""What the system knows of a process, from /proc: its state, how long it ran, and its bytes.

Elsewhere than on Linux nothing is known, and a verdict then rests on heartbeats alone.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import Literal

from armillary.training.checkpoint.shard_writer import MODULE as WRITER_MODULE

ProcessState = Literal["running", "sleeping", "disk", "stopped", "gone", "unknown"]
_STATES: dict[str, ProcessState] = {
    "R": "running",
    "S": "sleeping",
    "I": "sleeping",
    "D": "disk",
    "T": "stopped",
    "Z": "gone",
    "X": "gone",
}


def process_state(pid: int, born: int = 0) -> ProcessState:
    """Of a process of this machine; `born` is its start time (store.writer_process), 0 where that is not known."""
    if not Path("/proc/self/stat").exists():
        return "unknown"
    fields = _fields(pid)
    if not fields or (born and int(fields[19]) != born):
        return "gone"
    return _STATES.get(fields[0], "unknown")


def tree_runnable_s(pid: int, *, writers: bool = True) -> float:
    """Seconds in which the threads of a process and its children ran, or were ready to run and waited for a core: on a
    busy machine a rank that computes may get little of it. Loader workers are children; so are those that write and
    upload checkpoints, which `writers` counts."""
    return sum(_runnable_s(each) for each in _tree(pid, writers=writers))


def _runnable_s(pid: int) -> float:
    total = 0.0
    with suppress(OSError, ValueError):
        for path in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):  # a thread may end meanwhile
                ran, waited, *_ = (path / "schedstat").read_text().split()
                total += (int(ran) + int(waited)) / 1e9
    return total


def tree_io_bytes(pid: int, *, writers: bool = True) -> int:
    """Bytes that a process and its children have read and written, caches included; `writers` as above."""
    total = 0
    for each in _tree(pid, writers=writers):
        with suppress(OSError, ValueError):
            lines = Path(f"/proc/{each}/io").read_text().splitlines()[:2]
            total += sum(int(line.split()[1]) for line in lines)
    return total


def is_writing(pid: int) -> bool:
    """Whether a process that writes checkpoints for this one waits for the disk."""
    return any(process_state(each) == "disk" for each in _children(pid) if _is_writer(each))


def free_bytes(folder: Path) -> int:
    """Free space of the disk that a folder is on; -1 where it cannot be read."""
    try:
        facts = os.statvfs(folder)
    except OSError:
        return -1
    return facts.f_bavail * facts.f_frsize


def _tree(pid: int, *, writers: bool) -> list[int]:
    return [pid, *(each for each in _children(pid) if writers or not _is_writer(each))]


def _is_writer(pid: int) -> bool:
    with suppress(OSError):
        return WRITER_MODULE.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return False


def _children(pid: int) -> list[int]:
    """Children of all its threads."""
    matches: list[int] = []
    with suppress(OSError, ValueError):
        for path in Path(f"/proc/{pid}/task").iterdir():
            matches += map(int, (path / "children").read_text().split())
    return matches


def _fields(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on (see proc(5)); the name before it may hold spaces and brackets."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []
