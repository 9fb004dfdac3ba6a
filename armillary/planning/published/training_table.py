"""Predictions for a table of published training runs, beside what was measured, with the error.

A row's error is predicted / measured − 1 of the figure it publishes: tokens/s, else seconds a step, else TFLOP/s by the
convention it states; memory is held against what the allocator counted, and a row that ran out against the device.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from armillary.errors import ArmillaryError
from armillary.planning.device_model.frameworks import software
from armillary.planning.published.fitting import is_fitted_on
from armillary.planning.published.row_cluster import chip_of
from armillary.planning.published.row_model import Row, number
from armillary.planning.published.training_row import TrainingRow, measurement, predicted, training_row
from armillary.planning.training.memory_breakdown import memory
from armillary.planning.training.step_time import step_time

REQUIRED = frozenset({"model", "gpu", "seq_len", "micro_batch", "tp", "pp"})
"""columns by which a table is known to be one of training"""
GB = 1e9


@dataclass(frozen=True, kw_only=True)
class TrainingPrediction:
    """One row, predicted or not."""

    row: Row
    """as read"""
    framework: str
    """without its release"""
    kind: str
    """dense, moe, lora, hybrid"""
    complete: bool
    """whether the row says all that a prediction needs"""
    fitted: bool
    """whether a framework's numbers were fitted on rows like it (even config_id)"""
    figure: str = ""
    """what the error is taken of"""
    measured: float | None = None
    """as published"""
    predicted: float | None = None
    """the same figure"""
    physics: float | None = None
    """the same figure without any fitted number"""
    step_s: float | None = None
    """predicted seconds a step"""
    memory_measured: float | None = None
    """bytes"""
    memory_predicted: float | None = None
    """bytes the allocator would count"""
    ran_out: bool = False
    """the row says it ran out of memory"""
    called_out: bool | None = None
    """the prediction exceeds the device"""
    assumed: tuple[str, ...] = ()
    """what was filled in by rule"""
    reason: str = ""
    """why there is no prediction"""

    @property
    def error(self) -> float | None:
        return _ratio(self.predicted, self.measured)

    @property
    def physics_error(self) -> float | None:
        return _ratio(self.physics, self.measured)

    @property
    def memory_error(self) -> float | None:
        return _ratio(self.memory_predicted, self.memory_measured)


def _ratio(found: float | None, measured: float | None) -> float | None:
    return found / measured - 1 if found is not None and measured else None


def is_training_table(columns: Iterable[str]) -> bool:
    return set(columns) >= REQUIRED


def predict_rows(rows: Iterable[Row], *, physics_only: bool = False) -> list[TrainingPrediction]:
    """Every row predicted, or with the reason why it cannot be."""
    return [predict_row(row, physics_only=physics_only) for row in rows]


def predict_row(row: Row, *, physics_only: bool = False) -> TrainingPrediction:
    """One row; `physics_only` leaves every fitted number out."""
    framework = (row.get("framework") or "unknown").split(" ")[0]
    said = TrainingPrediction(
        row=row,
        framework=framework,
        kind=row.get("kind") or "dense",
        complete=is_yes(row.get("complete") or "yes"),
        fitted=is_fitted_on(row.get("config_id") or "1"),
        ran_out="oom" in (row.get("note") or "").lower(),
    )
    try:
        return _priced(said, ready(row, fitted=not physics_only))
    except ArmillaryError as error:
        return replace(said, reason=str(error))


def ready(row: Row, *, fitted: bool = True) -> TrainingRow:
    """The row as a case, under its framework's software."""
    chip = chip_of(row.get("gpu") or "").name
    return training_row(row, software(row.get("framework") or "", chip=chip, fitted=fitted))


def _priced(said: TrainingPrediction, found: TrainingRow) -> TrainingPrediction:
    figure = measurement(found.row)
    held = number(found.row, "measured_mem_gb")
    if figure is None and held is None and not said.ran_out:
        return replace(said, reason="nothing was measured")
    bytes_ = memory(found.case, found.layouts)
    room = found.case.cluster.chip.memory_bytes or float("inf")
    said = replace(
        said,
        memory_measured=held * GB if held else None,
        memory_predicted=float(bytes_.allocated[0]),
        called_out=bool(bytes_.total[0] > room),
        assumed=found.assumed,
    )
    if figure is None:
        return said
    seconds = float(step_time(found.case, found.layouts).total[0])
    plain = replace(found.case, software=found.case.software.with_numbers({}))
    same = not found.case.software.fitted
    physics = seconds if same else float(step_time(plain, found.layouts).total[0])
    return replace(
        said,
        figure=figure.name,
        measured=figure.value,
        predicted=predicted(found, figure.name, seconds),
        physics=predicted(found, figure.name, physics),
        step_s=seconds,
    )


def is_yes(text: str) -> bool:
    """Whether a cell says yes."""
    return text.strip().lower() in ("yes", "y", "true", "1")
