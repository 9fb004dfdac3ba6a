"""When the next checkpoint is due, where the recipe leaves it open: every ten minutes, and rarely enough.

Only the main rank decides: its decision is part of the all-reduce before each step (step_batches), so all ranks save
after the same step and no collective is added.
"""

import time
from collections.abc import Callable

from armillary.spec.tables.train import TrainJob

EVERY_S = 600.0
"""training that a crash may cost at most, about"""
APART = 50
"""saves are at least so many times what training loses to them apart: at most 2 % of a run"""
IN_FLIGHT = 2
"""and so many times as long as one takes to write, so that none waits for the one before"""
MEASURED_STEPS = 10
"""steps of a process after which the clock on the wall is believed rather than the plan"""


class SaveClock:
    """`is_due(step)` before each step, `saved(seconds)` after each save."""

    def __init__(
        self, job: TrainJob, predicted_step_s: float | None, *, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._every, self._predicted_s, self._now = job.save_every, predicted_step_s or 0.0, now
        self._milestones = frozenset(job.milestones.values())
        self._since, self._steps, self._taken, self._cost_s, self._writing_s = now(), 0, 0, 0.0, 0.0

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint follows step number `step`. A recipe's own interval counts steps from the beginning of
        the run; 0 means only at the end. Called once per step: True starts a new interval."""
        if self._every is not None:
            return (bool(self._every) and (step + 1) % self._every == 0) or step + 1 in self._milestones
        self._steps, self._taken = self._steps + 1, self._taken + 1
        if self._passed_s() < max(EVERY_S, APART * self._cost_s, IN_FLIGHT * self._writing_s):
            return step + 1 in self._milestones
        self._restart()
        return True

    def saved(self, seconds: float) -> None:
        """A checkpoint was begun, or written, and training lost so long."""
        self._cost_s = seconds
        self._restart()

    def committed(self, seconds: float) -> None:
        """A checkpoint was written completely, so long after it was begun."""
        self._writing_s = seconds

    def _passed_s(self) -> float:
        """Training since the last save with the coming step in it: as planned while few steps were measured, unless
        they turn out slower than that; then by the clock, to which one more step like those before is added."""
        wall_s = self._now() - self._since
        planned_s = self._steps * self._predicted_s
        if self._taken <= MEASURED_STEPS:
            return max(wall_s, planned_s)
        return wall_s * self._steps / max(1, self._steps - 1)

    def _restart(self) -> None:
        self._since, self._steps = self._now(), 0


def interval_steps(job: TrainJob, predicted_step_s: float | None) -> int:
    """Steps between checkpoints as planned; 0 where there is one at the end only."""
    if job.save_every is not None:
        return job.save_every
    steps = max(1, round(EVERY_S / predicted_step_s)) if predicted_step_s else 0
    return steps if steps < job.steps else 0
