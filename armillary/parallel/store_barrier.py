"""Store barrier: ranks wait for work that takes longer than a collective's timeout, such as data preparation.

A collective would time out, so ranks wait on the rendezvous store, where a working rank sends heartbeats: it may take
hours. A failing rank says so; a process that ended is noticed at once on its own machine, and elsewhere by its silence.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch.distributed as dist

from armillary.errors import ArmillaryError
from armillary.store import nan_safe_json
from armillary.store.writer_process import Process, machine

BEAT_S = 1.0
SILENT_S = 120.0
"""without a heartbeat before a rank counts as lost: no library call was seen to block other threads that long"""
POLL_S = 0.5


class RankLost(ArmillaryError):
    """A rank ended, or fell silent, while others waited for it."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(text)
        self.rank = rank


class StoreBarrier:
    """Over `size` ranks that wait for each other after each piece of long work; all name the same pieces in order."""

    def __init__(
        self, *, rank: int, size: int, store: Any = None, silent_s: float = SILENT_S, beat_s: float = BEAT_S
    ) -> None:
        self._rank, self._size, self._silent_s, self._beat_s = rank, size, silent_s, beat_s
        self._store = dist.distributed_c10d._get_default_store() if store is None else store

    @contextmanager
    def working(self, what: str) -> Iterator[None]:
        """Send heartbeats around this rank's part of `what`, and then wait until every rank has done its own."""
        process = asdict(Process.this()) | {"machine": machine()}
        self._store.set(self._key("process", self._rank), nan_safe_json.dumps(process))
        ended = threading.Event()
        thread = threading.Thread(target=self._beat, args=(ended,), daemon=True, name="heartbeats")
        thread.start()
        try:
            yield
        except BaseException:
            with _store_may_be_gone():
                self._finish(failed=True)
            raise
        finally:
            ended.set()
            thread.join()
        self._wait(what)

    def _beat(self, ended: threading.Event) -> None:
        with _store_may_be_gone():  # then the wait that follows says so
            while not ended.wait(self._beat_s):
                self._store.add(self._key("beats", self._rank), 1)

    def _finish(self, *, failed: bool = False) -> int:
        """Report that this rank's part is over; returns how many there have been."""
        if failed:
            self._store.set(self._key("failed", self._rank, self._read("done", self._rank) + 1), "")
        count: int = self._store.add(self._key("done", self._rank), 1)
        return count

    def _wait(self, what: str) -> None:
        try:
            count = self._finish()
            for other in range(self._size):
                self._wait_for(other, count, what)
        except dist.DistError as error:
            raise RankLost(
                0,
                f"the store that ranks meet in went away while they had to {what}: the rank or launcher "
                "that held it ended; see what it said, and start again",
            ) from error

    def _wait_for(self, other: int, count: int, what: str) -> None:
        """Polls the store for one rank at a time, however many there are."""
        beats, heard, pause = -1, time.monotonic(), 0.002
        while self._read("done", other) < count:
            if (last := self._read("beats", other)) != beats:
                beats, heard = last, time.monotonic()
            if self._is_gone(other):
                raise _lost(other, "ended", what)
            if time.monotonic() - heard > self._silent_s:
                raise _lost(other, f"gave no sign of life for {self._silent_s:g} s", what)
            time.sleep(pause)
            pause = min(2 * pause, POLL_S)
        if self._store.check([self._key("failed", other, count)]):
            raise _lost(other, "failed", what)

    def _is_gone(self, other: int) -> bool:
        """Known only of processes on the same machine."""
        key = self._key("process", other)
        if not self._store.check([key]):
            return False
        process = nan_safe_json.loads(self._store.get(key).decode())
        return process.pop("machine") == machine() and Process(**process).is_gone

    def _read(self, name: str, rank: int) -> int:
        value: int = self._store.add(self._key(name, rank), 0)
        return value

    def _key(self, *parts: str | int) -> str:
        return "/".join(map(str, ("store_barrier", *parts)))


def _lost(rank: int, how: str, what: str) -> RankLost:
    return RankLost(rank, f"rank {rank} {how} while ranks waited for it to {what}; see what it said, and start again")


@contextmanager
def _store_may_be_gone() -> Iterator[None]:
    try:
        yield
    except dist.DistError:
        return
