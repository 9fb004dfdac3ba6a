"""Identity of a writing process, and whether it still runs.

A process id alone is reused (in a container it is often 1 every time), so the start time goes with it. Read from /proc
rather than by psutil, because training writes files on machines without psutil, and because the start time in clock
ticks is part of file names and leases that exist.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Process:
    """One process of one machine."""

    pid: int
    born: int  # start time in clock ticks since boot; 0 where the system does not report it
    host: str

    @classmethod
    def this(cls) -> Process:
        return cls.of(os.getpid())

    @classmethod
    def of(cls, pid: int) -> Process:
        """A process of this machine."""
        return cls(pid=pid, born=_born(pid), host=socket.gethostname())

    @property
    def is_gone(self) -> bool:
        """Whether it is known to have ended; False for a process of another machine."""
        if self.host != socket.gethostname():
            return False
        if not _exists(self.pid):
            return True
        return bool(self.born) and self.born != _born(self.pid)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return _stat(pid)[:1] != ["Z"]


def _born(pid: int) -> int:
    fields = _stat(pid)
    return int(fields[19]) if fields else 0


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on (see proc(5)); the name before it may hold spaces and brackets."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def machine() -> str:
    """Host name, boot and process namespace, within which a process id is unique."""
    return "/".join((socket.gethostname(), _boot(), _namespace()))


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
