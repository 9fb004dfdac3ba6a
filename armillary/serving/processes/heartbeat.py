"""The engine's heartbeat: a thread that tells the server, during a long step, that the process lives and what it does.

Short steps need none: each brings a message of its own. Times are counted by the beats, so that a process which was
stopped, or a machine which slept, does not come back with a step of an hour.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import FrameType

from armillary.engine.engine_thread import EngineThread
from armillary.serving.processes.engine_ipc import Beat

EVERY_S = 0.5


class Pulse:
    """Watches the thread of a worker."""

    def __init__(self, worker: EngineThread, send: Callable[[Beat], None], every_s: float = EVERY_S) -> None:
        self._worker, self._send, self._every_s = worker, send, every_s
        self._step_s = self._still_s = 0.0
        self._seen: tuple[int, ...] = ()
        """where the thread was"""

    def start(self) -> None:
        """For as long as the process lives."""
        threading.Thread(target=self._run, name="pulse", daemon=True).start()

    def _run(self) -> None:
        before = time.monotonic()
        while True:
            time.sleep(self._every_s)
            now = time.monotonic()
            self.beat(now - before)
            before = now

    def beat(self, slept_s: float) -> None:
        """`slept_s` after the last one: look, and tell the server where a turn takes longer than two beats."""
        times, quiet_s = self._worker.engine.loop.times, self._worker.quiet_s()
        times.wanted = True
        counted = min(slept_s, 2 * self._every_s)
        where = _where(self._worker.frame())
        if quiet_s < slept_s:  # another turn than at the last beat
            self._step_s = self._still_s = min(quiet_s, counted)
        else:
            self._step_s += counted
            self._still_s = self._still_s + counted if where == self._seen else 0.0
        self._seen = where
        if quiet_s > 2 * self._every_s:
            tokens, expected_s = self._worker.engine.under_way()
            self._send(Beat(step_s=self._step_s, still_s=self._still_s, tokens=tokens, expected_s=expected_s))


def _where(frame: FrameType | None) -> tuple[int, ...]:
    """The place of a thread in its program: what it calls, and how far it is in each."""
    found: list[int] = []
    while frame is not None:
        found += (id(frame.f_code), frame.f_lasti)
        frame = frame.f_back
    return tuple(found)
