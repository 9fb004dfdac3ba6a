"""Judging the planner on a table of measured configurations: read a CSV, predict every row, and report the errors.

The columns show whether it is a training or an inference table. Rows that cannot be predicted are kept with the reason,
and the share that could be is part of the result.
"""

import csv
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from armillary.errors import BadData, NotFound, unknown
from armillary.planning.published import inference_table, training_table
from armillary.planning.published.inference_table import InferencePrediction
from armillary.planning.published.row_case import Row
from armillary.planning.published.training_table import TrainingPrediction, is_yes


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A table with its predictions."""

    kind: str
    rows: list[dict[str, Any]]
    """one per row: its number in the file, the measured and predicted figure, the error, or the reason there is none"""
    summary: dict[str, Any]

    def plain(self) -> dict[str, Any]:
        return {"rows": self.rows, "summary": self.summary}


def judge(path: str | Path, filters: Sequence[str] = (), *, physics_only: bool = False) -> Judged:
    """Predict every row of a CSV that passes the filters."""
    rows = read_table(path)
    wanted = {i: row for i, row in enumerate(rows, start=1) if all(keeps(row, name) for name in filters)}
    if not wanted:
        raise BadData(f"no row of {path} passes --filter {','.join(filters)}; leave a filter out")
    judged = _judged(list(wanted.values()), physics_only)
    numbered = [{"row": i, **row} for i, row in zip(wanted, judged.rows, strict=True)]
    return replace(judged, rows=numbered)


def _judged(rows: list[Row], physics_only: bool) -> Judged:
    if training_table.is_training_table(rows[0]):
        return judge_training(training_table.predict_rows(rows, physics_only=physics_only))
    return judge_inference(
        inference_table.predict_rows(rows, physics_only=physics_only),
        inference_table.predict_rows(rows, physics_only=True),
    )


def read_table(path: str | Path) -> list[Row]:
    """The rows of a CSV with the columns of a training or an inference table."""
    try:
        with Path(path).open(newline="", encoding="utf-8-sig") as file:  # spreadsheets write a byte-order mark
            reader = csv.DictReader(file)
            rows = [{key.strip().lower(): value or "" for key, value in row.items() if key} for row in reader]
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise NotFound(f"no table '{path}'; give the path of a .csv file") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise BadData(f"{path} is not a CSV file in UTF-8 ({error}); save it as one") from None
    if not rows:
        raise BadData(f"{path} has no rows; add a line of headings and one per configuration")
    columns = list(rows[0])
    if not training_table.is_training_table(columns) and not inference_table.is_inference_table(columns):
        lacking = sorted(training_table.REQUIRED - set(columns))
        raise BadData(
            f"{path} is neither a training nor an inference table; a training table also needs the columns "
            f"{', '.join(lacking)}"
        )
    return list(rows)


_FILTERS: dict[str, Callable[[Row], bool]] = {
    "newest": lambda row: is_yes(row.get("newest_of_config") or "yes"),
    "complete": lambda row: is_yes(row.get("complete") or "yes"),
    "dense": lambda row: row.get("kind") == "dense",
    "moe": lambda row: row.get("kind") == "moe",
    "lora": lambda row: row.get("kind") == "lora",
}


def keeps(row: Row, name: str) -> bool:
    """Whether a row passes a filter; a table without its column passes."""
    if name not in _FILTERS:
        raise unknown("filter", name, _FILTERS)
    return _FILTERS[name](row)


# --- training


def judge_training(predictions: Sequence[TrainingPrediction]) -> Judged:
    """Predictions of training rows with their summary."""
    speeds = [prediction for prediction in predictions if prediction.error is not None]
    measured = [prediction for prediction in predictions if _has_speed(prediction)]
    held_out = [prediction for prediction in speeds if not prediction.fitted]
    summary = summarise([prediction.error for prediction in speeds if prediction.error is not None])
    summary |= {
        "complete": sum(prediction.complete for prediction in predictions),
        "predicted": len(speeds) / len(measured) if measured else None,
        "by_framework": _groups(speeds, "framework"),
        "by_kind": _groups(speeds, "kind"),
        "held_out": summarise([prediction.error for prediction in held_out if prediction.error is not None]),
        "physics_only": summarise(
            [prediction.physics_error for prediction in speeds if prediction.physics_error is not None]
        ),
        "memory": _memory(predictions),
        "not_predicted": _reasons(
            (prediction.framework, prediction.reason) for prediction in predictions if prediction.reason
        ),
    }
    return Judged(kind="training", rows=[_training_row(prediction) for prediction in predictions], summary=summary)


def _has_speed(prediction: TrainingPrediction) -> bool:
    columns = ("measured_tokens_per_s_per_gpu", "measured_step_s", "measured_tflops_per_gpu", "measured_mfu_pct")
    return any((prediction.row.get(column) or "").strip() for column in columns)


def _groups(predictions: Sequence[TrainingPrediction], name: str) -> dict[str, dict[str, Any]]:
    pairs = [(getattr(prediction, name), prediction) for prediction in predictions]
    errors = by_group((group, prediction.error) for group, prediction in pairs if prediction.error is not None)
    physics = by_group(
        (group, prediction.physics_error) for group, prediction in pairs if prediction.physics_error is not None
    )
    held = by_group(
        (group, prediction.error)
        for group, prediction in pairs
        if prediction.error is not None and not prediction.fitted
    )
    return {
        group: part | {"physics_only": physics[group]["mape"], "held_out": held.get(group, {}).get("mape")}
        for group, part in errors.items()
    }


def _memory(predictions: Sequence[TrainingPrediction]) -> dict[str, Any]:
    """Memory of the rows that measured it, and what became of those that ran out."""
    asked = [prediction for prediction in predictions if (prediction.row.get("measured_mem_gb") or "").strip()]
    known = [prediction for prediction in asked if prediction.memory_error is not None]
    out = [prediction for prediction in predictions if prediction.ran_out]
    part = summarise([prediction.memory_error for prediction in known if prediction.memory_error is not None])
    return part | {
        "measured": len(asked),
        "predicted": len(known) / len(asked) if asked else None,
        "oom_rows": len(out),
        "oom_called": sum(prediction.called_out is True for prediction in out),
        "by_framework": by_group(
            (prediction.framework, prediction.memory_error)
            for prediction in known
            if prediction.memory_error is not None
        ),
    }


def _training_row(prediction: TrainingPrediction) -> dict[str, Any]:
    return {
        "config_id": prediction.row.get("config_id"),
        "framework": prediction.row.get("framework"),
        "model": prediction.row.get("model"),
        "gpu": prediction.row.get("gpu"),
        "n_gpus": prediction.row.get("n_gpus"),
        "kind": prediction.kind,
        "complete": prediction.complete,
        "fitted": prediction.fitted,
        "figure": prediction.figure or None,
        "measured": prediction.measured,
        "predicted": prediction.predicted,
        "error": prediction.error,
        "physics_only": prediction.physics,
        "physics_error": prediction.physics_error,
        "step_s": prediction.step_s,
        "memory_measured_bytes": prediction.memory_measured,
        "memory_predicted_bytes": prediction.memory_predicted,
        "memory_error": prediction.memory_error,
        "ran_out": prediction.ran_out,
        "called_out": prediction.called_out,
        "assumed": list(prediction.assumed),
        "reason": prediction.reason or None,
    }


# --- inference


def judge_inference(predictions: Sequence[InferencePrediction], plain: Sequence[InferencePrediction]) -> Judged:
    """Predictions of inference rows with their summary; `plain` are those of the physics alone."""
    known = [prediction for prediction in predictions if prediction.error is not None]
    summary = summarise([prediction.error for prediction in known if prediction.error is not None])
    summary |= {
        "complete": len(predictions),
        "predicted": len(known) / len(predictions) if predictions else None,
        "by_framework": _inference_groups(predictions, plain, "engine"),
        "by_kind": _inference_groups(predictions, plain, "kind"),
        "held_out": summarise(
            [prediction.error for prediction in known if prediction.error is not None and not prediction.fitted]
        ),
        "held_out_by_kind": by_group(
            (f"{prediction.engine}, {prediction.kind}", prediction.error)
            for prediction in known
            if prediction.error is not None and not prediction.fitted
        ),
        "physics_only": summarise([prediction.error for prediction in plain if prediction.error is not None]),
        "memory": {},
        "not_predicted": _reasons(
            (prediction.engine, prediction.reason) for prediction in predictions if prediction.reason
        ),
    }
    pairs = zip(predictions, plain, strict=True)
    return Judged(
        kind="inference", rows=[_inference_row(prediction, other) for prediction, other in pairs], summary=summary
    )


def _inference_groups(
    predictions: Sequence[InferencePrediction], plain: Sequence[InferencePrediction], name: str
) -> dict[str, dict[str, Any]]:
    """Errors by engine or kind, with the held-out half and the physics alone beside them."""
    errors = by_group(
        (getattr(prediction, name), prediction.error) for prediction in predictions if prediction.error is not None
    )
    physics = by_group(
        (getattr(prediction, name), prediction.error) for prediction in plain if prediction.error is not None
    )
    held = by_group(
        (getattr(prediction, name), prediction.error)
        for prediction in predictions
        if prediction.error is not None and not prediction.fitted
    )
    return {
        group: part | {"physics_only": physics[group]["mape"], "held_out": held.get(group, {}).get("mape")}
        for group, part in errors.items()
    }


def _inference_row(prediction: InferencePrediction, plain: InferencePrediction) -> dict[str, Any]:
    return {
        "config_id": prediction.config_id,
        "framework": prediction.row.get("engine"),
        "model": prediction.row.get("model"),
        "gpu": prediction.row.get("gpu"),
        "kind": prediction.kind,
        "fitted": prediction.fitted,
        "figure": prediction.gauge or None,
        "measured": prediction.measured.get(prediction.gauge),
        "predicted": prediction.predicted.get(prediction.gauge),
        "error": prediction.error,
        "physics_error": plain.error,
        "all_measured": dict(prediction.measured),
        "all_predicted": dict(prediction.predicted),
        "reason": prediction.reason or None,
    }


def _reasons(pairs: Iterable[tuple[str, str]]) -> list[dict[str, Any]]:
    """Why rows were not predicted, the most frequent first."""
    counts: dict[tuple[str, str], int] = {}
    for pair in pairs:
        counts[pair] = counts.get(pair, 0) + 1
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    return [{"framework": name, "reason": reason, "rows": count} for (name, reason), count in ordered]


def summarise(errors: Sequence[float]) -> dict[str, Any]:
    """rows, mape, median, bias and worst of signed relative errors; None where there are none."""
    if not errors:
        return {"rows": 0, "mape": None, "median": None, "bias": None, "worst": None}
    signed = np.asarray(errors, dtype=float)
    size = np.abs(signed)
    return {
        "rows": len(errors),
        "mape": float(size.mean()),
        "median": float(np.median(size)),
        "bias": float(signed.mean()),
        "worst": float(signed[int(np.argmax(size))]),
    }


def by_group(pairs: Iterable[tuple[str, float]]) -> dict[str, dict[str, Any]]:
    """The summary of each group, largest first."""
    groups: dict[str, list[float]] = {}
    for name, error in pairs:
        groups.setdefault(name, []).append(error)
    return {name: summarise(errors) for name, errors in sorted(groups.items(), key=lambda item: -len(item[1]))}
