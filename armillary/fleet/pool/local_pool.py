"""A pool of server processes on this machine, each with its record in a folder: NAME.json and NAME.log.

The records outlive the process that wrote them: a new pool over the same folder adopts the servers that still run, and
forgets the others. `renew` keeps them alive (keeper.py).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

from armillary.spec.replica_pool import Member, State
from armillary.spec.toml.fields import build, to_plain
from armillary.store.atomic import write_json
from armillary.store.writer_process import Process

Command = Callable[[int, str], list[str]]
"""(port, release) -> command line of a server on 127.0.0.1"""
LASTS_S = 60.0
"""seconds that servers go on without an autoscaler"""
_PROBE_S = 1.0
LEASE = "lease"


@dataclass(frozen=True, kw_only=True)
class Record:
    """What the folder keeps of a server."""

    name: str
    pid: int
    born: int
    port: int
    began: float
    ready: float | None = None
    release: str = ""
    stopping: bool = False


class LocalPool:
    """Servers as child processes."""

    def __init__(
        self, folder: Path, command: Command, *, lasts_s: float = LASTS_S, probe: Callable[[str], bool] | None = None
    ) -> None:
        """`probe`: whether the server at an address is ready; none: GET /ready."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._command, self._lasts_s = folder, command, lasts_s
        self._probe = probe or is_ready
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self.renew()

    @property
    def _lease(self) -> Path:
        return self._folder / LEASE

    def renew(self) -> None:
        """Servers go on for another `lasts_s`."""
        self._lease.touch()

    def members(self) -> Sequence[Member]:
        self.renew()
        present = [_member(record) for record in map(self._checked, self._records()) if record is not None]
        for child in list(self._children.values()):
            if child.poll() is not None:  # else it stays as a zombie
                del self._children[child.pid]
        return present

    def start(self, release: str = "") -> Member:
        port, number = _free_port(), 1 + max((_number(path) for path in self._folder.glob("*.log")), default=0)
        name = f"replica-{number}"
        command = [sys.executable, "-m", "armillary.fleet.pool.keeper", str(self._lease), str(self._lasts_s)]
        with (self._folder / f"{name}.log").open("wb") as log:
            child = subprocess.Popen(
                [*command, *self._command(port, release)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C ends the service, which drains its servers
            )
        self._children[child.pid] = child
        born = Process.of(child.pid).born
        record = Record(name=name, pid=child.pid, born=born, port=port, began=time.time(), release=release)
        self._write(record)
        return _member(record)

    def stop(self, name: str) -> None:
        record = self._record(name)
        if record is not None:
            self._write(replace(record, stopping=True))
            with suppress(ProcessLookupError):
                os.kill(record.pid, signal.SIGTERM)

    def kill(self, name: str) -> None:
        record = self._record(name)
        if record is not None and not self._is_gone(record):
            with suppress(ProcessLookupError):
                os.killpg(record.pid, signal.SIGKILL)
            with suppress(KeyError):
                self._children.pop(record.pid).wait()
        self._path(name).unlink(missing_ok=True)

    def stop_all(self, grace_s: float) -> None:
        """End every server: let them finish for so long, then kill what is left."""
        for member in self.members():
            self.stop(member.name)
        end = time.monotonic() + grace_s
        while self.members() and time.monotonic() < end:
            time.sleep(0.1)
        for member in self.members():
            self.kill(member.name)

    def log(self, name: str) -> str:
        return str(self._folder / f"{name}.log")

    # --- records

    def _checked(self, record: Record) -> Record | None:
        if self._is_gone(record):
            self._path(record.name).unlink(missing_ok=True)
            return None
        if record.ready is None and not record.stopping and self._probe(_url(record)):
            record = replace(record, ready=time.time())
            self._write(record)
        return record

    def _is_gone(self, record: Record) -> bool:
        return Process(pid=record.pid, born=record.born, host=socket.gethostname()).is_gone

    def _records(self) -> list[Record]:
        records = []
        for path in sorted(self._folder.glob("*.json"), key=_number):
            with suppress(OSError, ValueError):
                records.append(build(Record, json.loads(path.read_text(encoding="utf-8")), path.name))
        return records

    def _record(self, name: str) -> Record | None:
        return next((record for record in self._records() if record.name == name), None)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.json"

    def _write(self, record: Record) -> None:
        write_json(self._path(record.name), to_plain(record))


def is_ready(url: str) -> bool:
    """Whether GET /ready answers 200."""
    try:
        with urlopen(f"{url}/ready", timeout=_PROBE_S) as response:
            return bool(response.status == 200)
    except (HTTPError, URLError, OSError, ValueError):
        return False


def _member(record: Record) -> Member:
    state: State = "stopping" if record.stopping else "starting" if record.ready is None else "ready"
    return Member(
        name=record.name,
        url=_url(record),
        state=state,
        began=record.began,
        ready=record.ready,
        release=record.release,
    )


def _url(record: Record) -> str:
    return f"http://127.0.0.1:{record.port}"


def _number(path: Path) -> int:
    tail = path.stem.rpartition("-")[2]
    return int(tail) if tail.isdigit() else 0


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
