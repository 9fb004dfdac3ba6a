"""What a run writes down as it goes: gauges, trackers, how far it is. Only the main rank writes.

With a GPU a step is written down while the device works on the next one, so that a slow disk or tracker costs nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

from armillary.errors import ArmillaryError
from armillary.store.gauges import GaugeWriter
from armillary.store.run_events import add_event
from armillary.store.runs import Run, Say
from armillary.training.telemetry.process_stats import source_of
from armillary.training.telemetry.step_telemetry import StepReport
from armillary.training.telemetry.trackers import Trackers
from armillary.training.trainer import Trainer

Watch = Callable[[StepReport], None]
_UNWRITABLE = (ArmillaryError, OSError)
_UPDATE_S = 2.0
"""seconds between notes of how far a run is, each of which is synced to disk"""


class Recorder:
    """On the main rank: writes a step's gauges, shows them, and notes now and then how far the run is. A report is
    written at once, or with a GPU by the next `write()`."""

    def __init__(self, run: Run, trainer: Trainer, *, watch: Watch | None, say: Say, start: int) -> None:
        self.run, self.trainer, self.watch = run, trainer, watch
        self._say, self._start = say, start
        self._stack = ExitStack()
        self._gauges: GaugeWriter | None = None
        self._trackers: Trackers | None = None
        self._updated = time.monotonic()
        self._waiting: list[tuple[StepReport, bool]] = []

    def __enter__(self) -> Recorder:
        if self.trainer.world.is_main:
            for note in self.trainer.text.notes:
                self._say(note)
            job, recipe = self.trainer.job, self.trainer.plan.recipe
            self._gauges = self._stack.enter_context(GaugeWriter(self.run.gauges, step=self._start))
            opened = Trackers(job.track, self.run, say=self._say, recipe=recipe, start=self._start)
            self._trackers = self._stack.enter_context(opened)
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            with suppress(*(_UNWRITABLE if error[0] else ())):  # a full disk must not hide why the run failed
                self.write()
        finally:
            self._stack.__exit__(*error)

    def __call__(self, report: StepReport, *, last: bool) -> None:
        if not self.trainer.world.is_main:
            return
        self._waiting.append((report, last))
        if last or self.trainer.device.type != "cuda":
            self.write()

    def rewind(self, step: int) -> None:
        """The run goes on from `step`: records of it and of later steps are removed."""
        self.write()
        if self._gauges is not None:
            self._gauges.close()
            self._gauges = self._stack.enter_context(GaugeWriter(self.run.gauges, step=step))

    def write(self) -> None:
        """Write down what waits."""
        while self._waiting:
            self._write(*self._waiting.pop(0))

    def _write(self, report: StepReport, last: bool) -> None:
        assert self._gauges is not None and self._trackers is not None, "a recorder is used as a context"
        told = {"val_loss", "checkpoint_s", "compute_s", "torch_call_s", "memory_weights_bytes"} & set(report.gauges)
        if last or told or report.step % self.trainer.job.log_every == 0:
            source = source_of(report.gauges, report.sources, self.trainer.device)
            self._gauges.write(report.gauges, step=report.step, source=source)
            self._trackers(report.step, report.gauges)
        if last or time.monotonic() - self._updated > _UPDATE_S:
            self.run.update(step=report.step + 1, loss=report.gauges["loss"])
            self._updated = time.monotonic()
        if self.watch:
            self.watch(report)


def note_failure(run: Run, error: BaseException) -> None:
    """Best effort: the disk may be full, which must not hide why the run failed."""
    stopped = isinstance(error, KeyboardInterrupt)
    add_event(run.folder, "stopped" if stopped else "failed")
    with suppress(*_UNWRITABLE):
        run.update(state="interrupted" if stopped else "failed", error=str(error) or type(error).__name__)
