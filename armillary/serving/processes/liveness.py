"""Whether an engine is alive, slow or hung, from the time and content of its last message.

Messages arrive after every step and twice per second during a long step. Either the process is silent, because it is
stopped or holds the GIL; or heartbeats arrive while a step does not end, and the limit follows from the expected
duration of a step of that size, so that a slow machine has time and a fast one is not waited for.
"""

import time
from collections.abc import Callable
from typing import Any

from armillary.serving.processes.engine_ipc import HeartbeatMessage

_LATE = 4.0
"""a step longer than this times its upper estimate makes the server not ready"""
_HUNG = 20.0
"""a step longer than this times its estimate, at one place of the program, is hung"""
_ADVANCING = 10.0
"""factor on both limits where the thread advances: it compiles a kernel, or layers take minutes"""
_UNKNOWN = 10.0
"""factor on `hung_s` before any step was measured"""


class Liveness:
    """The liveness of one engine."""

    def __init__(self, *, frozen_s: float, hung_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.frozen_s, self.hung_s = frozen_s, hung_s
        self.clock = clock
        self.heard_at = clock()
        self._beat: HeartbeatMessage | None = None

    def heard(self, message: Any = None) -> None:
        """The engine sent a message; without one, it has just started."""
        self.heard_at = self.clock()
        self._beat = message if isinstance(message, HeartbeatMessage) else None

    def excuse(self, seconds: float) -> None:
        """This process was delayed by `seconds` and may not have read the engine's messages."""
        self.heard_at = min(self.clock(), self.heard_at + seconds)

    def slow(self) -> str | None:
        """Why the server is not ready; none: it is."""
        return self._overdue(self.frozen_s, _LATE)

    def hung(self) -> str | None:
        """Why the engine is to be killed; none: it may recover."""
        return None if self.hung_s is None else self._overdue(self.hung_s, _HUNG)

    def _overdue(self, least_s: float, times: float) -> str | None:
        """Text about an engine that has been silent for more than `least_s`, or about a step that has run for more than
        that and `times` its estimate; else none."""
        silent_s = self.clock() - self.heard_at
        if silent_s > least_s:
            return f"the engine has been silent for {silent_s:.0f} s"
        beat = self._beat
        if beat is None:
            return None
        unknown_s = float("inf") if self.hung_s is None else self.hung_s * _UNKNOWN
        limit_s = unknown_s if beat.expected_s is None else max(least_s, times * beat.expected_s)
        if max(beat.still_s, beat.step_s / _ADVANCING) <= limit_s:
            return None
        known = "" if beat.expected_s is None else f", expected to take {beat.expected_s:.2g} s"
        return f"a step of {beat.tokens:,} tokens has run for {beat.step_s:.0f} s{known}"
