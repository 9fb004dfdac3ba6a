"""The clock of a run: tells its events file what the main rank spends time on, and knows the goodput so far."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from armillary.store.goodput import GoodputAccount, account_of
from armillary.store.run_events import EventName, add_event, read_events
from armillary.store.runs import Run

WRITE_S = 1.0
"""seconds between two lines while steps follow each other: a killed run does not know of more steps than these"""


class RunClock:
    """`enter(…)` whenever the run begins to do something else, `stepped(…)` after each step. Other ranks than the main
    one only count."""

    def __init__(self, run: Run, *, writes: bool = True) -> None:
        self._folder, self._writes = run.folder, writes
        self.step = 0
        self._data_wait_s = self._logging_s = self._useful_s = 0.0
        self._began = self._written = time.time()
        self._is_stepping = self._knows_past = False
        self._past: GoodputAccount | None = None

    def enter(self, event: EventName, step: int | None = None) -> None:
        """The run does this from now on; `step` steps are complete."""
        self.step = self.step if step is None else step
        self._write(event)
        self._is_stepping = event == "steps"
        if self._is_stepping and not self._knows_past:
            self._look_back()
            self._knows_past = True

    @contextmanager
    def during(self, event: EventName, step: int) -> Iterator[None]:
        """Between two steps."""
        self.enter(event, step)
        yield
        self.enter("steps")

    def stepped(self, step: int, gauges: Mapping[str, float]) -> None:
        """`step` steps are complete; of the last one these are the gauges."""
        self.step = step
        self._useful_s += gauges.get("step_s", 0.0)
        self._data_wait_s += gauges.get("data_wait_s", 0.0)
        self._logging_s += gauges.get("between_steps_s", 0.0)
        if time.time() - self._written >= WRITE_S:
            self._write("steps")

    def take_past(self) -> dict[str, float]:
        """Once: what failures have cost the run so far; nothing where there were none."""
        past, self._past = self._past, None
        if past is None or not past.num_failures:
            return {}
        return {
            "failures_total": float(past.num_failures),
            "repeated_fraction": past.share("repeated"),
            "restart_fraction": past.restart_s / past.total_s if past.total_s else 0.0,
        }

    @property
    def goodput_fraction(self) -> float:
        """Time of steps that were not lost, over the time since the run was created."""
        return min(1.0, self._useful_s / max(1e-9, time.time() - self._began))

    def _look_back(self) -> None:
        """What the run did before this process took its first step."""
        events = read_events(self._folder)
        if events:
            account = self._past = account_of(events)
            self._useful_s, self._began = account.seconds["useful"], time.time() - account.total_s

    def _write(self, event: EventName) -> None:
        self._written = time.time()
        if not self._writes:
            return
        done = {"data_wait_s": self._data_wait_s, "logging_s": self._logging_s} if self._is_stepping else {}
        self._data_wait_s = self._logging_s = 0.0
        add_event(self._folder, event, now=self._written, step=self.step, **done)
