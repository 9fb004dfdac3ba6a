"""Ctrl-C and SIGTERM as a request to stop after the current step, so that what was learnt is kept.

A second Ctrl-C stops at once; a second SIGTERM does not, because schedulers send it to every process of a job while
torchrun sends it to its ranks as well.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from types import FrameType
from typing import Any, Self

from armillary.errors import BadInput
from armillary.spec.tables.train import TrainJob


class StopRequest:
    """`with StopRequest() as stop: while not stop.asked(): …`; handlers are put back at the end."""

    def __init__(self, parent: int = 0, also: Callable[[], bool] | None = None) -> None:
        """`parent`, where given, is the process that started this one: its end is a request to stop, too, and so is
        what `also()` says."""
        self._asked, self._parent, self._also = False, parent, also
        self._before: dict[int, Any] = {}

    def asked(self) -> bool:
        orphaned = bool(self._parent and os.getppid() != self._parent)
        return self._asked or orphaned or (self._also is not None and self._also())

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self._asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._asked = True


GAUGES = ("val_loss", "loss")


@dataclass(frozen=True, kw_only=True)
class Until:
    """A goal: val_loss or loss at or below a value."""

    gauge: str
    value: float

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

    def is_met(self, gauges: Mapping[str, float]) -> bool:
        return gauges.get(self.gauge, float("inf")) <= self.value
