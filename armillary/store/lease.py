"""Leases: which process owns a run, shown by a heartbeat in the run's folder, so that it works between machines.

    lease.json    owner, process, machine, and a count (`beat`) that the owner raises every `beat_s` seconds

A lease is live while its count rises. A reader decides as follows:

- On the owner's machine (same host name, boot and process namespace) the lease is live while the process runs.
- From another machine, clocks are not compared, because those of two hosts may differ by minutes. The file's age is the
  difference between its time stamp and that of a file made this moment in the same folder: both are set by the same
  file system. An old stamp alone is not enough to take a run away, since some file systems let clients set it: the
  count is then watched for a beat and a half. A young one is watched until it has been silent for `lasts_s`.

A process that takes a lease over writes itself as the owner. The old owner reads that at its next beat, or before its
next checkpoint, and stops without writing.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from armillary.errors import ArmillaryError, BadInput
from armillary.spec.toml.fields import build, to_plain
from armillary.store import nan_safe_json
from armillary.store.atomic import write_json
from armillary.store.lock import locked
from armillary.store.writer_process import Process, machine

NAME, LOCK = "lease.json", ".lease.lock"
BEAT_S, LASTS_S = 10.0, 60.0
"""seconds between two beats, and of silence after which a lease is stale"""
_POLL_S = 0.2


class LeaseLost(BadInput):
    """Another process has taken the run over."""


@dataclass(frozen=True, kw_only=True)
class Lease:
    """The owner of a run."""

    owner: str  # random id of the lease
    host: str
    pid: int
    born: int = 0  # start time of that process, see Process
    machine: str = ""  # stricter than its host name, see machine()
    beat: int = 0  # number of renewals
    beat_s: float = BEAT_S
    lasts_s: float = LASTS_S  # of silence, after which it is stale
    released: bool = False

    @classmethod
    def new(cls) -> Lease:
        return cls(owner=secrets.token_hex(8), host="", pid=0).by_this_process()

    def by_this_process(self) -> Lease:
        """The same lease, renewed by this process."""
        this = Process.this()
        return replace(
            self, host=this.host, pid=this.pid, born=this.born, machine=machine(), beat=self.beat + 1, released=False
        )

    @property
    def process(self) -> Process:
        return Process(pid=self.pid, born=self.born, host=self.host)

    @property
    def is_here(self) -> bool:
        """Whether its process is on this machine."""
        return self.machine == machine()

    @property
    def is_ours(self) -> bool:
        """Whether this process or its parent holds it, as a launcher does for its ranks."""
        return self.is_here and self.pid in (os.getpid(), os.getppid()) and not self.process.is_gone

    @property
    def text(self) -> str:
        return f"process {self.pid} on {self.host}"


# --- the file


def read_lease(folder: Path) -> Lease | None:
    """The lease of a run; None where there is none (runs of older versions) or it is unreadable."""
    try:
        return build(Lease, nan_safe_json.read_table(folder / NAME), NAME)
    except (ArmillaryError, OSError):
        return None


def write_lease(folder: Path, lease: Lease) -> None:
    write_json(folder / NAME, to_plain(lease))


def is_live(folder: Path, lease: Lease) -> bool:
    """Whether a lease looks live now."""
    if lease.released:
        return False
    return not lease.process.is_gone if lease.is_here else age_s(folder) < lease.lasts_s


def age_s(folder: Path) -> float:
    """Time since the last beat by the file system's clock; by this machine's where the folder is read-only."""
    beaten = os.stat(folder / NAME).st_mtime
    probe = folder / f".now-{secrets.token_hex(4)}"
    try:
        probe.touch()
        return probe.stat().st_mtime - beaten
    except OSError:
        return time.time() - beaten
    finally:
        with suppress(OSError):  # a read-only mount
            probe.unlink(missing_ok=True)


def keeps_beating(folder: Path, lease: Lease, say: Callable[[str], None] = lambda text: None) -> bool:
    """Whether a lease is live; a lease of another machine is watched until that is certain."""
    if lease.is_here or lease.released:
        return is_live(folder, lease)
    young = age_s(folder) < lease.lasts_s
    patience = lease.lasts_s if young else 1.5 * lease.beat_s
    if young:
        say(f"{lease.text} had this run a moment ago; watching it for up to {patience:.0f} s")
    end = time.monotonic() + patience
    while time.monotonic() < end:
        time.sleep(min(_POLL_S, lease.beat_s))
        now = read_lease(folder)
        if now is None or now.released:
            return False
        if (now.owner, now.beat) != (lease.owner, lease.beat):
            return True
    return False


def take(folder: Path, seen: Lease | None) -> Lease:
    """Replace the lease that was `seen` by a new one; LeaseLost where another process was faster."""
    with locked(folder / LOCK):
        now = read_lease(folder)
        if (now and now.owner) != (seen and seen.owner):
            raise LeaseLost(f"{now.text if now else 'another process'} took this run in the same moment; try again")
        lease = now.by_this_process() if now is not None and now.is_ours else Lease.new()
        write_lease(folder, lease)
        return lease


def renew(folder: Path, owner: str) -> None:
    """Renew a lease of this owner by this process, as a launcher does between two starts of its ranks."""
    with locked(folder / LOCK):
        lease = read_lease(folder)
        if lease is not None and lease.owner == owner:
            write_lease(folder, lease.by_this_process())


# --- holding it


def taken_over(run: str, lease: Lease | None) -> LeaseLost:
    """What the process that lost a run says."""
    by = f" by {lease.text}" if lease is not None else ""
    return LeaseLost(
        f"run {run} was taken over{by}; this process has stopped and wrote nothing since: follow the run there"
    )


class HeldLease:
    """A lease that a thread of this process renews: `with HeldLease(folder, owner) as held: …`."""

    def __init__(self, folder: Path, owner: str) -> None:
        """`owner` is the one in the file: of this process or its parent."""
        self.folder, self.owner = folder, owner
        self.lost = False  # whether another process had taken it over at the last beat
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lease", daemon=True)

    def __enter__(self) -> Self:
        self._change(Lease.by_this_process)
        self.check()
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._ended.set()
        self._thread.join()
        self._change(lambda lease: replace(lease, released=True))

    def check(self) -> None:
        """LeaseLost where another process has taken it over, by the file now."""
        lease = read_lease(self.folder)
        self.lost = self.lost or (lease is not None and lease.owner != self.owner)
        if self.lost:
            raise taken_over(self.folder.name, lease)

    def _beat(self) -> None:
        lease = read_lease(self.folder)
        while not self.lost and not self._ended.wait(lease.beat_s if lease is not None else BEAT_S):
            self._change(Lease.by_this_process)

    def _change(self, change: Callable[[Lease], Lease]) -> None:
        """Change a lease that is still ours. A disk error is no reason to stop: the lease ages meanwhile, and a process
        that takes it over appears in the file."""
        try:
            with locked(self.folder / LOCK):
                lease = read_lease(self.folder)
                if lease is not None and lease.owner == self.owner:
                    write_lease(self.folder, change(lease))
                self.lost = self.lost or (lease is not None and lease.owner != self.owner)
        except (ArmillaryError, OSError):
            return
