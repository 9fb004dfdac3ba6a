"""Progress of one rank: its step, its phase, and a count that rises whenever it gets on.

The training loop marks; the heartbeat's thread reads. A mark is two assignments, so that it costs a step nothing.
"""

import time
from collections import deque
from collections.abc import Callable
from statistics import median

STEP_PHASES = frozenset({"data", "forward", "loss", "backward", "optimizer"})
BETWEEN = "between steps"
STEADY_STEPS = 3
"""steps after which their time is known: the first ones compile, choose and fill caches"""
_WINDOW = 16


class Progress:
    """`start_step()` before each step, `mark(phase)` at the start of each phase."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.step = -1
        self.phase = "setup"
        self.marks = 0
        self._clock = clock
        self._started: float | None = None
        self._steps: deque[float] = deque(maxlen=_WINDOW)

    def mark(self, phase: str) -> None:
        """The rank enters a phase of its step, or saves, validates, resumes."""
        self.phase = phase
        self.marks += 1
        if phase not in STEP_PHASES and phase != BETWEEN:
            self._started = None  # what validates or saves is no step

    def start_step(self) -> None:
        now = self._clock()
        if self._started is not None:
            self._steps.append(now - self._started)
        self.step += 1  # steps follow each other; the step itself sets its number
        self.mark("data")
        self._started = now

    @property
    def step_s(self) -> float:
        """Median time of the last steps; 0 where it is not known yet."""
        steps = list(self._steps)
        return median(steps) if len(steps) >= STEADY_STEPS else 0.0

    @property
    def in_step(self) -> bool:
        """Whether the rank is inside a step, where it never waits for a checkpoint to be written."""
        return self.phase in STEP_PHASES

    @property
    def is_steady(self) -> bool:
        """Whether the rank is inside a step, and knows how long one takes."""
        return self.in_step and len(self._steps) >= STEADY_STEPS
