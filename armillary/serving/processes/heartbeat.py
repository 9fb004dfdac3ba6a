"""The engine's heartbeat: a thread that reports to the server during a long step.

Short steps need no heartbeat: each sends a message of its own. Times are counted in beats, so that a process that was
stopped, or a machine that slept, does not report a step of an hour.
"""

import threading
import time
from collections.abc import Callable
from types import FrameType

from armillary.engine.engine_thread import EngineThread
from armillary.serving.processes.engine_ipc import HeartbeatMessage

INTERVAL_S = 0.5


class Heartbeat:
    """Watches the engine's thread."""

    def __init__(
        self, worker: EngineThread, send: Callable[[HeartbeatMessage], None], interval_s: float = INTERVAL_S
    ) -> None:
        self._worker, self._send, self._interval_s = worker, send, interval_s
        self._step_s = self._still_s = 0.0
        self._seen: tuple[int, ...] = ()

    def start(self) -> None:
        """Run until the process ends."""
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def _run(self) -> None:
        before = time.monotonic()
        while True:
            time.sleep(self._interval_s)
            now = time.monotonic()
            self.beat(now - before)
            before = now

    def beat(self, slept_s: float) -> None:
        """Report a step that takes longer than two beats; `slept_s` is the time since the last beat."""
        times, quiet_s = self._worker.engine.loop.times, self._worker.quiet_s()
        times.wanted = True
        counted = min(slept_s, 2 * self._interval_s)
        position = _position(self._worker.frame())
        if quiet_s < slept_s:  # a new step since the last beat
            self._step_s = self._still_s = min(quiet_s, counted)
        else:
            self._step_s += counted
            self._still_s = self._still_s + counted if position == self._seen else 0.0
        self._seen = position
        if quiet_s > 2 * self._interval_s:
            tokens, expected_s = self._worker.engine.under_way()
            self._send(
                HeartbeatMessage(step_s=self._step_s, still_s=self._still_s, tokens=tokens, expected_s=expected_s)
            )


def _position(frame: FrameType | None) -> tuple[int, ...]:
    """The position of a thread in its program: code and instruction of each frame."""
    position: list[int] = []
    while frame is not None:
        position += (id(frame.f_code), frame.f_lasti)
        frame = frame.f_back
    return tuple(position)
