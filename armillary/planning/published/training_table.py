"""Predictions for a table of published training runs, with their errors.

The error of a row is predicted / measured − 1 of its published figure: tokens/s, else seconds per step, else TFLOP/s by
the convention it states. Memory is compared with what the allocator counted, and an OOM row with the device.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from armillary.errors import ArmillaryError
from armillary.planning.device_model.frameworks import interval_width, software
from armillary.planning.published.row_case import Row, chip_of, is_fitted_on, number
from armillary.planning.published.training_row import (
    TrainingRow,
    measurement,
    predicted,
    stated_precision,
    training_row,
)
from armillary.planning.training.memory_breakdown import CONTEXT_BYTES, Memory, memory
from armillary.planning.training.step_time import step_time
from armillary.planning.training.uncertainty import Interval, interval, spread

REQUIRED = frozenset({"model", "gpu", "seq_len", "micro_batch", "tp", "pp"})
"""columns that identify a training table"""
GB = 1e9


@dataclass(frozen=True, kw_only=True)
class TrainingPrediction:
    """One row, predicted or not."""

    row: Row
    framework: str
    """without its release"""
    kind: str
    complete: bool
    fitted: bool
    """whether the framework's factors were fitted on rows like it (even config_id)"""
    figure: str = ""
    measured: float | None = None
    predicted: float | None = None
    physics: float | None = None
    """value of the figure without fitted factors"""
    step_s: float | None = None
    memory_measured: float | None = None
    memory_predicted: float | None = None
    ran_out: bool = False
    """the row reports an out-of-memory error"""
    called_out: bool | None = None
    """the prediction exceeds the device"""
    interval: Interval | None = None
    """90 % interval of the figure"""
    assumed: tuple[str, ...] = ()
    """settings that the row does not state, with what another choice would change"""
    reason: str = ""

    @property
    def error(self) -> float | None:
        return _ratio(self.predicted, self.measured)

    @property
    def is_inside(self) -> bool | None:
        """Whether the measured figure lies in the interval."""
        return self.interval.contains(self.measured) if self.interval and self.measured else None

    @property
    def physics_error(self) -> float | None:
        return _ratio(self.physics, self.measured)

    @property
    def memory_error(self) -> float | None:
        return _ratio(self.memory_predicted, self.memory_measured)


def _ratio(predicted: float | None, measured: float | None) -> float | None:
    return predicted / measured - 1 if predicted is not None and measured else None


def is_training_table(columns: Iterable[str]) -> bool:
    return set(columns) >= REQUIRED


def predict_rows(rows: Iterable[Row], *, physics_only: bool = False) -> list[TrainingPrediction]:
    """Every row predicted, or with the reason why it cannot be."""
    return [predict_row(row, physics_only=physics_only) for row in rows]


def predict_row(row: Row, *, physics_only: bool = False) -> TrainingPrediction:
    """One row; `physics_only` leaves out every fitted factor."""
    framework = (row.get("framework") or "unknown").split(" ")[0]
    result = TrainingPrediction(
        row=row,
        framework=framework,
        kind=row.get("kind") or "dense",
        complete=is_yes(row.get("complete") or "yes"),
        fitted=is_fitted_on(row.get("config_id") or "1"),
        ran_out="oom" in (row.get("note") or "").lower(),
    )
    try:
        return _priced(result, ready(row, fitted=not physics_only))
    except ArmillaryError as error:
        return replace(result, reason=str(error))


def ready(row: Row, *, fitted: bool = True) -> TrainingRow:
    """The row as a case, with its framework's software."""
    chip, model = chip_of(row.get("gpu") or "").name, row.get("model") or ""
    precision = stated_precision(row.get("precision") or "bf16")
    chosen = software(row.get("framework") or "", chip=chip, model=model, precision=precision, fitted=fitted)
    return training_row(row, chosen)


def _priced(result: TrainingPrediction, row: TrainingRow) -> TrainingPrediction:
    figure = measurement(row.row)
    gigabytes = number(row.row, "measured_mem_gb")
    if figure is None and gigabytes is None and not result.ran_out:
        return replace(result, reason="nothing was measured")
    usage = memory(row.case, row.layouts)
    limit = row.case.cluster.chip.memory_bytes or float("inf")
    result = replace(
        result,
        memory_measured=gigabytes * GB if gigabytes else None,
        memory_predicted=reported_memory(row, usage),
        called_out=bool(usage.total[0] > limit),
        assumed=row.assumed,
    )
    if figure is None:
        return result
    time = step_time(row.case, row.layouts)
    seconds = float(time.total[0])
    ratios = {name: float(step_time(row.case, other).total[0]) / seconds for name, other in row.alternatives.items()}
    effect = sum((ratio - 1) ** 2 for ratio in ratios.values()) ** 0.5
    uncertain = float(spread(row.case, time, effect)[0])
    expected = predicted(row, figure.name, seconds)
    unfitted = replace(row.case, software=row.case.software.with_numbers({}))
    physics = float(step_time(unfitted, row.layouts).total[0]) if row.case.software.fitted else seconds
    return replace(
        result,
        figure=figure.name,
        measured=figure.value,
        predicted=expected,
        interval=interval(expected, uncertain, interval_width(row.row.get("framework") or "")),
        assumed=(*row.assumed, *(_sensitivity(name, ratio) for name, ratio in ratios.items())),
        physics=predicted(row, figure.name, physics),
        step_s=seconds,
    )


def _sensitivity(name: str, ratio: float) -> str:
    return f"{name} would change the step by {(ratio - 1) * 100:+.0f} %"


RESERVED = 1.1
"""bytes that torch's caching allocator reserves over those allocated at the peak: it keeps blocks of other sizes"""


def reported_memory(row: TrainingRow, usage: Memory) -> float:
    """The peak as the row's framework reports it: allocated, or reserved, which is at most what the device has."""
    allocated = float(usage.allocated[0])
    if not row.case.software.reports_reserved:
        return allocated
    limit = row.case.cluster.chip.memory_bytes or float("inf")
    return max(allocated, min(allocated * RESERVED, limit - CONTEXT_BYTES))


def is_yes(text: str) -> bool:
    """Whether a cell says yes."""
    return text.strip().lower() in ("yes", "y", "true", "1")
