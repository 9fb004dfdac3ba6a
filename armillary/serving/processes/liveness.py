"""Whether an engine lives, is slow, or hangs, by what it was last heard to say.

Two things can be wrong. The process is silent: it is stopped, or holds its interpreter; messages come after every step,
and twice a second during a long one. Or it beats while a step does not end: then the limit follows from how long a step
of that size is expected to take, so that a slow machine is left alone and a fast one is not waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from armillary.serving.processes.engine_ipc import Beat

_LATE = 4.0
"""times what is expected: a step that takes longer makes the server not ready. What is expected is an upper estimate"""
_HUNG = 20.0
"""times what is expected, in one place of the program: that step does not end"""
_MOVES = 10.0
"""times those limits for a step whose thread moves on: a kernel is being compiled, or layers take minutes"""
_UNKNOWN = 10.0
"""times `hung_s` for a step while none was measured yet"""


class Liveness:
    """What is known of one engine."""

    def __init__(self, *, frozen_s: float, hung_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.frozen_s, self.hung_s = frozen_s, hung_s
        self.clock = clock
        self.heard_at = clock()
        self._beat: Beat | None = None
        """of a step that is not over"""

    def heard(self, message: Any = None) -> None:
        """It said something; without a message, it is new."""
        self.heard_at = self.clock()
        self._beat = message if isinstance(message, Beat) else None

    def excuse(self, seconds: float) -> None:
        """We were held up ourselves for so long, and may have read nothing."""
        self.heard_at = min(self.clock(), self.heard_at + seconds)

    def silent_s(self) -> float:
        """Since it was last heard of."""
        return self.clock() - self.heard_at

    def slow(self) -> str | None:
        """Why nobody should be sent to it now; none: all is well."""
        if self.silent_s() > self.frozen_s:
            return f"the engine has been silent for {self.silent_s():.0f} s"
        return self._overdue(self.frozen_s, _LATE)

    def hung(self) -> str | None:
        """Why it is to be ended; none: it may come back."""
        if self.hung_s is None:
            return None
        if self.silent_s() > self.hung_s:
            return f"the engine has been silent for {self.silent_s():.0f} s"
        return self._overdue(self.hung_s, _HUNG)

    def _overdue(self, least_s: float, times: float) -> str | None:
        """What is said of a step that has run for more than `least_s` and `times` what is expected."""
        beat = self._beat
        if beat is None:
            return None
        unknown_s = float("inf") if self.hung_s is None else self.hung_s * _UNKNOWN
        most_s = unknown_s if beat.expected_s is None else max(least_s, times * beat.expected_s)
        if max(beat.still_s, beat.step_s / _MOVES) <= most_s:
            return None
        known = "" if beat.expected_s is None else f", expected to take {beat.expected_s:.2g} s"
        return f"a step of {beat.tokens:,} tokens has run for {beat.step_s:.0f} s{known}"
