"""Evaluation of the planner on a table of measured configurations: read a CSV, predict every row, report the errors.

The columns show whether it is a training or an inference table. Rows that cannot be predicted are listed with the
reason, and the share that could be is part of the result.
"""

import csv
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from armillary.errors import BadData, NotFound, unknown
from armillary.planning.published import inference_table, training_table
from armillary.planning.published.inference_table import InferencePrediction
from armillary.planning.published.row_case import Row
from armillary.planning.published.training_table import TrainingPrediction, is_yes

Prediction = TrainingPrediction | InferencePrediction


@dataclass(frozen=True, kw_only=True)
class TableEvaluation:
    """A table with its predictions."""

    rows: list[dict[str, Any]]
    """one per row: its number in the file, the measured and predicted figure, the error, or the reason there is none"""
    summary: dict[str, Any]

    def plain(self) -> dict[str, Any]:
        return {"rows": self.rows, "summary": self.summary}


def evaluate_table(path: str | Path, filters: Sequence[str] = (), *, physics_only: bool = False) -> TableEvaluation:
    """Predict every row of a CSV that passes the filters."""
    rows = {i: row for i, row in enumerate(read_table(path), start=1) if all(matches(row, name) for name in filters)}
    if not rows:
        raise BadData(f"no row of {path} passes --filter {','.join(filters)}; leave a filter out")
    if training_table.is_training_table(next(iter(rows.values()))):
        training = training_table.predict_rows(rows.values(), physics_only=physics_only)
        cells, summary = [_training_row(prediction) for prediction in training], _training_summary(training)
    else:
        inference = inference_table.predict_rows(rows.values(), physics_only=physics_only)
        cells, summary = [_inference_row(prediction) for prediction in inference], _inference_summary(inference)
    return TableEvaluation(rows=[{"row": i, **row} for i, row in zip(rows, cells, strict=True)], summary=summary)


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


def matches(row: Row, name: str) -> bool:
    """Whether a row passes a filter; a table without its column passes."""
    if name not in _FILTERS:
        raise unknown("filter", name, _FILTERS)
    return _FILTERS[name](row)


# --- training


def _training_summary(predictions: Sequence[TrainingPrediction]) -> dict[str, Any]:
    return _summary(
        predictions,
        complete=sum(prediction.complete for prediction in predictions),
        measured=sum(_has_speed(prediction) for prediction in predictions),
        memory=_memory(predictions),
        inside=_inside(predictions),
    )


def _inside(predictions: Sequence[TrainingPrediction]) -> float | None:
    """Share of rows whose measured speed lies in the 90 % interval."""
    judged = [prediction.is_inside for prediction in predictions if prediction.is_inside is not None]
    return sum(judged) / len(judged) if judged else None


def _has_speed(prediction: TrainingPrediction) -> bool:
    columns = ("measured_tokens_per_s_per_gpu", "measured_step_s", "measured_tflops_per_gpu", "measured_mfu_pct")
    return any((prediction.row.get(column) or "").strip() for column in columns)


def _memory(predictions: Sequence[TrainingPrediction]) -> dict[str, Any]:
    """Memory of the rows that measured it, and what became of those that ran out."""
    asked = [prediction for prediction in predictions if (prediction.row.get("measured_mem_gb") or "").strip()]
    known = [prediction for prediction in asked if prediction.memory_error is not None]
    out = [prediction for prediction in predictions if prediction.ran_out]
    return _errors(known, "memory_error") | {
        "measured": len(asked),
        "predicted": len(known) / len(asked) if asked else None,
        "oom_rows": len(out),
        "oom_called": sum(prediction.called_out is True for prediction in out),
        "by_framework": {name: _errors(group, "memory_error") for name, group in _groups(known, "framework").items()},
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
        "interval": [prediction.interval.low, prediction.interval.high] if prediction.interval else None,
        "inside": prediction.is_inside,
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


def _inference_summary(predictions: Sequence[InferencePrediction]) -> dict[str, Any]:
    held_out = [prediction for prediction in predictions if prediction.error is not None and not prediction.fitted]
    by_kind = {name: _errors(group) for name, group in _groups(held_out, "framework", "kind").items()}
    return _summary(
        predictions, complete=len(predictions), measured=len(predictions), memory={}, held_out_by_kind=by_kind
    )


def _inference_row(prediction: InferencePrediction) -> dict[str, Any]:
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
        "physics_error": prediction.physics_error,
        "all_measured": dict(prediction.measured),
        "all_predicted": dict(prediction.predicted),
        "reason": prediction.reason or None,
    }


# --- errors


def _summary(
    predictions: Sequence[Prediction], *, complete: int, measured: int, memory: dict[str, Any], **more: Any
) -> dict[str, Any]:
    known = [prediction for prediction in predictions if prediction.error is not None]
    reasons = Counter((prediction.framework, prediction.reason) for prediction in predictions if prediction.reason)
    return _errors(known) | {
        "complete": complete,
        "predicted": len(known) / measured if measured else None,
        "by_framework": {name: _with_baselines(group) for name, group in _groups(known, "framework").items()},
        "by_kind": {name: _with_baselines(group) for name, group in _groups(known, "kind").items()},
        "held_out": _errors([prediction for prediction in known if not prediction.fitted]),
        **more,
        "physics_only": _errors(known, "physics_error"),
        "memory": memory,
        "not_predicted": [
            {"framework": name, "reason": reason, "rows": count} for (name, reason), count in reasons.most_common()
        ],
    }


def _groups(predictions: Sequence[Prediction], *names: str) -> dict[str, list[Prediction]]:
    """Predictions by the values of these attributes, the largest group first."""
    groups: dict[str, list[Prediction]] = {}
    for prediction in predictions:
        groups.setdefault(", ".join(getattr(prediction, name) for name in names), []).append(prediction)
    return dict(sorted(groups.items(), key=lambda item: -len(item[1])))


def _with_baselines(predictions: Sequence[Prediction]) -> dict[str, Any]:
    """The errors, with those of the physics alone and of the rows that were not fitted beside them."""
    held_out = [prediction for prediction in predictions if not prediction.fitted]
    baselines = {"physics_only": _errors(predictions, "physics_error")["mape"], "held_out": _errors(held_out)["mape"]}
    return _errors(predictions) | baselines


def _errors(predictions: Sequence[Prediction], name: str = "error") -> dict[str, Any]:
    """rows, mape, median, bias and worst of a signed relative error; None where there are none."""
    if not predictions:
        return {"rows": 0, "mape": None, "median": None, "bias": None, "worst": None}
    signed = np.array([getattr(prediction, name) for prediction in predictions], dtype=float)
    size = np.abs(signed)
    return {
        "rows": len(signed),
        "mape": float(size.mean()),
        "median": float(np.median(size)),
        "bias": float(signed.mean()),
        "worst": float(signed[int(np.argmax(size))]),
    }
