"""Leases: which process has a run, told by a heartbeat in the run's folder, so that it holds on any machine.

    lease.json    owner, process, machine, and a count (`beat`) that the owner raises every `beat_s` seconds

A lease is live while its count rises. Who looks judges like this:

- On the machine (same host name, boot and process namespace) that holds it, the process is looked up: gone is stale at
  once, there is live.
- From another machine, clocks are not compared, because those of two hosts may differ by minutes. The file's age is the
  difference between its time stamp and that of a file made this moment in the same folder: both are set by the same
  file system. An old stamp alone is not enough to take a run away, since some file systems let clients set it: the
  count is then watched for a beat and a half. A young one is watched until it has been silent for `lasts_s`.

Whoever takes a lease over writes a new owner into it. The old one reads that at its next beat, or before its next
checkpoint, and stops without writing.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from armillary.errors import ArmillaryError, BadInput
from armillary.spec.toml.fields import build, to_plain
from armillary.store import strict_json
from armillary.store.atomic import write_json
from armillary.store.lock import locked
from armillary.store.writer_process import Process

NAME, LOCK = "lease.json", ".lease.lock"
BEAT_S, LASTS_S = 10.0, 60.0
"""seconds between two beats, and of silence after which nobody is there"""
_POLL_S = 0.2


class LeaseLost(BadInput):
    """Another process has taken the run over."""


@dataclass(frozen=True, kw_only=True)
class Lease:
    """Who has a run."""

    owner: str
    """drawn at random when it was taken"""
    host: str
    """machine of the process that renews it"""
    pid: int
    """that process"""
    born: int = 0
    """when it started, see Process"""
    machine: str = ""
    """what is one machine, more strictly than by its name"""
    beat: int = 0
    """how often it was renewed"""
    beat_s: float = BEAT_S
    """seconds between two beats"""
    lasts_s: float = LASTS_S
    """seconds of silence after which it is stale"""
    released: bool = False
    """given back by its owner"""

    @classmethod
    def new(cls) -> Lease:
        return cls(owner=secrets.token_hex(8), host="", pid=0).by_this_process()

    def by_this_process(self) -> Lease:
        """The same lease, renewed from here from now on."""
        me = Process.this()
        return replace(
            self, host=me.host, pid=me.pid, born=me.born, machine=machine(), beat=self.beat + 1, released=False
        )

    @property
    def process(self) -> Process:
        return Process(pid=self.pid, born=self.born, host=self.host)

    @property
    def is_here(self) -> bool:
        """Whether its process is one of this machine, which can be looked up."""
        return self.machine == machine()

    @property
    def is_ours(self) -> bool:
        """Held by this process or by the one that started it, as a launcher does for its ranks."""
        return self.is_here and self.pid in (os.getpid(), os.getppid()) and not self.process.is_gone

    @property
    def text(self) -> str:
        return f"process {self.pid} on {self.host}"


def machine() -> str:
    """Host name, boot and process namespace: where one process id means one process."""
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


# --- the file


def read_lease(folder: Path) -> Lease | None:
    """None where there is none, as in runs of older versions, or none that can be read."""
    try:
        return build(Lease, strict_json.read_table(folder / NAME), NAME)
    except (ArmillaryError, OSError):
        return None


def write_lease(folder: Path, lease: Lease) -> None:
    write_json(folder / NAME, to_plain(lease))


def is_live(folder: Path, lease: Lease) -> bool:
    """As far as one look tells."""
    if lease.released:
        return False
    return not lease.process.is_gone if lease.is_here else age_s(folder) < lease.lasts_s


def age_s(folder: Path) -> float:
    """Since the last beat, by the clock of the file system; by ours where the folder cannot be written."""
    beaten = os.stat(folder / NAME).st_mtime
    probe = folder / f".now-{secrets.token_hex(4)}"
    try:
        probe.touch()
        return probe.stat().st_mtime - beaten
    except OSError:
        return time.time() - beaten
    finally:
        with suppress(OSError):  # a share that is mounted read-only
            probe.unlink(missing_ok=True)


def keeps_beating(folder: Path, lease: Lease, say: Callable[[str], None] = lambda text: None) -> bool:
    """Whether a lease is live, watched from another machine for as long as it takes to be sure."""
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
    """A new lease in place of the one that was `seen`; LeaseLost where somebody else was quicker."""
    with locked(folder / LOCK):
        now = read_lease(folder)
        if (now and now.owner) != (seen and seen.owner):
            raise LeaseLost(f"{now.text if now else 'another process'} took this run in the same moment; try again")
        mine = now.by_this_process() if now is not None and now.is_ours else Lease.new()
        write_lease(folder, mine)
        return mine


# --- holding it


class Held:
    """A lease that this process renews from a thread of its own: `with Held(folder, owner) as held: …`."""

    def __init__(self, folder: Path, owner: str) -> None:
        """`owner` is the one that is in the file: taken by this process, or by the one that started it."""
        self.folder, self.owner = folder, owner
        self._over, self._lost = threading.Event(), False
        self._thread = threading.Thread(target=self._beat, name="lease", daemon=True)

    def __enter__(self) -> Self:
        self._change(Lease.by_this_process)
        self.check()
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._over.set()
        self._thread.join()
        self._change(lambda lease: replace(lease, released=True))

    @property
    def lost(self) -> bool:
        """Whether another process has taken it over, as far as the last beat knows."""
        return self._lost

    def check(self) -> None:
        """Raise LeaseLost where another process has taken it over, as the file says this moment."""
        lease = read_lease(self.folder)
        self._lost = self._lost or (lease is not None and lease.owner != self.owner)
        if self._lost:
            by = f" by {lease.text}" if lease is not None else ""
            raise LeaseLost(
                f"run {self.folder.name} was taken over{by}; this process has stopped and wrote nothing "
                "since: follow the run there"
            )

    def _beat(self) -> None:
        lease = read_lease(self.folder)
        while not self._lost and not self._over.wait(lease.beat_s if lease is not None else BEAT_S):
            self._change(Lease.by_this_process)

    def _change(self, change: Callable[[Lease], Lease]) -> None:
        """Renew what is still ours. A disk that cannot be read or written is no reason to stop: until it can be, the
        lease ages, and whoever takes it over is seen in the file."""
        try:
            with locked(self.folder / LOCK):
                lease = read_lease(self.folder)
                if lease is not None and lease.owner == self.owner:
                    write_lease(self.folder, change(lease))
                self._lost = self._lost or (lease is not None and lease.owner != self.owner)
        except (ArmillaryError, OSError):
            return
