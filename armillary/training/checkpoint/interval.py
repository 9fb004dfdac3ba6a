"""When the next checkpoint is due, where the recipe leaves it open: every ten minutes, and rarely enough.

Only the main rank decides: its decision is part of the all-reduce before each step (step_batches), so all ranks save
after the same step and no collective is added.
"""

import time
from collections.abc import Callable
from math import sqrt

from armillary.spec.tables.train import TrainJob
from armillary.store.goodput import GoodputAccount

EVERY_S = 600.0
"""training that a crash may cost at most, about"""
APART = 50
"""saves are at least so many times what training loses to them apart: at most 2 % of a run"""
IN_FLIGHT = 2
"""and so many times as long as one takes to write, so that none waits for the one before"""
SHORTEST_S, LONGEST_S = 10.0, 3600.0
"""between which an interval that follows a run's own failures stays"""
MEASURED_STEPS = 10
"""steps of a process after which the clock on the wall is believed rather than the plan"""


class SaveClock:
    """`is_due(step)` before each step, `saved(seconds)` after each save."""

    def __init__(
        self,
        job: TrainJob,
        predicted_step_s: float | None,
        *,
        past: GoodputAccount | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`past` is the account of the run so far, where its failures decide (`train.adapt_interval`)."""
        self._mtbf_s = past.mtbf_s if past is not None and job.adapt_interval else None
        self._past_cost_s = (past.save_s or 0.0) if past is not None else 0.0
        self._every, self._predicted_s, self._now = job.save_every, predicted_step_s or 0.0, now
        self._milestones = frozenset(job.milestones.values())
        self._since, self._steps, self._taken, self._cost_s, self._writing_s = now(), 0, 0, 0.0, 0.0

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint follows step number `step`. A recipe's own interval counts steps from the beginning of
        the run; 0 means only at the end. Called once per step: True starts a new interval."""
        if self._every is not None:
            return (bool(self._every) and (step + 1) % self._every == 0) or step + 1 in self._milestones
        self._steps, self._taken = self._steps + 1, self._taken + 1
        if self._passed_s() < self.interval_s:
            return step + 1 in self._milestones
        self._restart()
        return True

    @property
    def interval_s(self) -> float:
        """Training between two saves. With known failures √(2·δ·M), δ what a save costs and M the time between failures
        (Young 1974): then as much is lost to saves as to steps that are repeated."""
        in_flight_s = IN_FLIGHT * self._writing_s
        cost_s = self._cost_s or self._past_cost_s
        if self._mtbf_s is None or not cost_s:
            return max(EVERY_S, APART * self._cost_s, in_flight_s)
        return max(in_flight_s, min(LONGEST_S, max(SHORTEST_S, sqrt(2 * cost_s * self._mtbf_s))))

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
