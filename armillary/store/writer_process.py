"""Process: which process wrote something, and whether it is still there.

A process id alone is reused (in a container it is often 1 every time), so the time the process was born goes with it.
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
    """its id"""
    born: int
    """clock ticks from boot to its start; 0 where the system does not say"""
    host: str
    """name of the machine"""

    @classmethod
    def this(cls) -> Process:
        return cls(pid=os.getpid(), born=_born(os.getpid()), host=socket.gethostname())

    @property
    def is_gone(self) -> bool:
        """Known to have ended; False for a process of another machine, of which we cannot know."""
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
