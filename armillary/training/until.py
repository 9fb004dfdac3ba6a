"""`train.until = "val_loss=3.2"`: a run may end before its last step, once it is as good as was asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite

from armillary.errors import BadInput
from armillary.spec.tables.train import TrainJob

GAUGES = ("val_loss", "loss")


@dataclass(frozen=True, kw_only=True)
class Until:
    """A goal."""

    gauge: str
    """val_loss or loss"""
    value: float
    """reached at or below"""

    @classmethod
    def of(cls, job: TrainJob) -> Until | None:
        """The goal of a recipe, or None where it has none."""
        return cls.parse(job.until) if job.until else None

    @classmethod
    def parse(cls, text: str) -> Until:
        name, _, number = (part.strip() for part in text.partition("="))
        try:
            value = float(number)
        except ValueError:
            value = float("nan")
        if name not in GAUGES or not isfinite(value):
            raise BadInput(f"train.until={text} is no goal; try --set train.until=val_loss=3.2 (or loss=3.2)")
        return cls(gauge=name, value=value)

    def check(self, job: TrainJob, *, held_out: bool) -> None:
        """Refuse a goal that nothing could reach before the last step; `held_out`: there is text to validate on."""
        if self.gauge != "val_loss":
            return
        goal = f"train.until=val_loss={self.value:g} cannot be reached"
        if not held_out:
            raise BadInput(f"{goal}: no text is held out to validate on; try --set data.held_out=0.01")
        if not 0 < job.eval_every < job.steps:
            raise BadInput(
                f"{goal} before the last of {job.steps:,} steps: with train.eval_every={job.eval_every} "
                f"there is no validation; try --set train.eval_every={max(1, job.steps // 20)}"
            )

    def reached(self, gauges: Mapping[str, float]) -> bool:
        return gauges.get(self.gauge, float("inf")) <= self.value
