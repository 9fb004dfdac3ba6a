"""When a checkpoint is a delta: between full ones, as long as deltas save enough."""

from dataclasses import dataclass

from armillary.errors import Unreadable
from armillary.store.manifest import size_faults
from armillary.store.runs import Run

WORTH = 0.10
"""share of the bytes that a delta must save; below it the run writes full checkpoints only"""


@dataclass(kw_only=True)
class DeltaSchedule:
    """Of the main rank of one process: every `full_every`-th checkpoint is full, and the first one."""

    full_every: int = 1
    base: int | None = None  # step of the last full checkpoint of this process
    deltas: int = 0  # since then
    off: bool = False

    def next_base(self, run: Run) -> int | None:
        """The step that the next checkpoint is a delta of; None where it is a full one."""
        if self.off or self.base is None or self.deltas + 1 >= self.full_every:
            return None
        try:
            return None if size_faults(run.checkpoint(self.base)) else self.base
        except Unreadable:
            return None

    def committed(self, step: int, base: int | None, saved_fraction: float) -> str:
        """Count a checkpoint; returns what there is to say about it."""
        if base is None:
            self.base, self.deltas = step, 0
            return ""
        self.deltas += 1
        if saved_fraction >= WORTH:
            return ""
        self.off = True
        saves = f"checkpoint {step} saved only {saved_fraction:.0%} as a delta of {base}"
        return f"{saves}: this run writes full ones from now on"
