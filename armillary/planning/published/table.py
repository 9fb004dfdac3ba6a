"""Tables of measured configurations: read a CSV, predict every row, and say how far off the predictions are.

What kind of table it is shows in its columns. Rows that cannot be predicted are kept with the reason, and the share
that could is part of the result.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from armillary.errors import BadData, NotFound, unknown
from armillary.planning.published import inference_table, training_table
from armillary.planning.published.inference_table import InferencePrediction
from armillary.planning.published.row_model import Row
from armillary.planning.published.training_table import TrainingPrediction, is_yes


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A table with its predictions."""

    kind: str
    """'training' or 'inference'"""
    rows: list[dict[str, Any]]
    """one a row: its number in the file, what was measured and predicted, the error, or the reason there is none"""
    summary: dict[str, Any]
    """errors as fractions"""

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
        with Path(path).open(newline="", encoding="utf-8-sig") as file:  # spreadsheets put a mark before the headings
            reader = csv.DictReader(file)
            rows = [{key.strip().lower(): value or "" for key, value in row.items() if key} for row in reader]
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise NotFound(f"no table '{path}'; give the path of a .csv file") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise BadData(f"{path} is not a CSV file in UTF-8 ({error}); save it as one") from None
    if not rows:
        raise BadData(f"{path} has no rows; add a line of headings and one a configuration")
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
    """Whether a row passes a filter; a table without its column passes whole."""
    if name not in _FILTERS:
        raise unknown("filter", name, _FILTERS)
    return _FILTERS[name](row)


# --- training


def judge_training(found: Sequence[TrainingPrediction]) -> Judged:
    """Predictions of training rows with their summary."""
    speeds = [one for one in found if one.error is not None]
    asked = [one for one in found if _has_speed(one)]
    others = [one for one in speeds if not one.fitted]
    summary = summarise([one.error for one in speeds if one.error is not None])
    summary |= {
        "complete": sum(one.complete for one in found),
        "predicted": len(speeds) / len(asked) if asked else None,
        "by_framework": _groups(speeds, "framework"),
        "by_kind": _groups(speeds, "kind"),
        "held_out": _half(others),
        "physics_only": summarise([one.physics_error for one in speeds if one.physics_error is not None]),
        "memory": _memory(found),
        "not_predicted": _reasons((one.framework, one.reason) for one in found if one.reason),
    }
    return Judged(kind="training", rows=[_training_row(one) for one in found], summary=summary)


def _has_speed(one: TrainingPrediction) -> bool:
    columns = ("measured_tokens_per_s_per_gpu", "measured_step_s", "measured_tflops_per_gpu", "measured_mfu_pct")
    return any((one.row.get(column) or "").strip() for column in columns)


def _groups(found: Sequence[TrainingPrediction], name: str) -> dict[str, dict[str, Any]]:
    pairs = [(getattr(one, name), one) for one in found]
    errors = by_group((group, one.error) for group, one in pairs if one.error is not None)
    physics = by_group((group, one.physics_error) for group, one in pairs if one.physics_error is not None)
    held = by_group((group, one.error) for group, one in pairs if one.error is not None and not one.fitted)
    return {
        group: part | {"physics_only": physics[group]["mape"], "held_out": held.get(group, {}).get("mape")}
        for group, part in errors.items()
    }


def _half(found: Sequence[TrainingPrediction]) -> dict[str, Any]:
    return summarise([one.error for one in found if one.error is not None])


def _memory(found: Sequence[TrainingPrediction]) -> dict[str, Any]:
    """Memory of the rows that measured it, and what became of those that ran out."""
    asked = [one for one in found if (one.row.get("measured_mem_gb") or "").strip()]
    known = [one for one in asked if one.memory_error is not None]
    out = [one for one in found if one.ran_out]
    part = summarise([one.memory_error for one in known if one.memory_error is not None])
    return part | {
        "measured": len(asked),
        "predicted": len(known) / len(asked) if asked else None,
        "oom_rows": len(out),
        "oom_called": sum(one.called_out is True for one in out),
        "by_framework": by_group((one.framework, one.memory_error) for one in known if one.memory_error is not None),
    }


def _training_row(one: TrainingPrediction) -> dict[str, Any]:
    return {
        "config_id": one.row.get("config_id"),
        "framework": one.row.get("framework"),
        "model": one.row.get("model"),
        "gpu": one.row.get("gpu"),
        "n_gpus": one.row.get("n_gpus"),
        "kind": one.kind,
        "complete": one.complete,
        "fitted": one.fitted,
        "figure": one.figure or None,
        "measured": one.measured,
        "predicted": one.predicted,
        "error": one.error,
        "physics_only": one.physics,
        "physics_error": one.physics_error,
        "step_s": one.step_s,
        "memory_measured_bytes": one.memory_measured,
        "memory_predicted_bytes": one.memory_predicted,
        "memory_error": one.memory_error,
        "ran_out": one.ran_out,
        "called_out": one.called_out,
        "assumed": list(one.assumed),
        "reason": one.reason or None,
    }


# --- inference


def judge_inference(found: Sequence[InferencePrediction], plain: Sequence[InferencePrediction]) -> Judged:
    """Predictions of inference rows with their summary; `plain` are those of physics alone."""
    known = [one for one in found if one.error is not None]
    summary = summarise([one.error for one in known if one.error is not None])
    summary |= {
        "complete": len(found),
        "predicted": len(known) / len(found) if found else None,
        "by_framework": _inference_groups(found, plain, "engine"),
        "by_kind": _inference_groups(found, plain, "kind"),
        "held_out": summarise([one.error for one in known if one.error is not None and not one.fitted]),
        "held_out_by_kind": by_group(
            (f"{one.engine}, {one.kind}", one.error) for one in known if one.error is not None and not one.fitted
        ),
        "physics_only": summarise([one.error for one in plain if one.error is not None]),
        "memory": {},
        "not_predicted": _reasons((one.engine, one.reason) for one in found if one.reason),
    }
    pairs = zip(found, plain, strict=True)
    return Judged(kind="inference", rows=[_inference_row(one, other) for one, other in pairs], summary=summary)


def _inference_groups(
    found: Sequence[InferencePrediction], plain: Sequence[InferencePrediction], name: str
) -> dict[str, dict[str, Any]]:
    """Errors by engine or kind, with the half not fitted and physics alone beside them."""
    errors = by_group((getattr(one, name), one.error) for one in found if one.error is not None)
    physics = by_group((getattr(one, name), one.error) for one in plain if one.error is not None)
    held = by_group((getattr(one, name), one.error) for one in found if one.error is not None and not one.fitted)
    return {
        group: part | {"physics_only": physics[group]["mape"], "held_out": held.get(group, {}).get("mape")}
        for group, part in errors.items()
    }


def _inference_row(one: InferencePrediction, plain: InferencePrediction) -> dict[str, Any]:
    return {
        "config_id": one.config_id,
        "framework": one.row.get("engine"),
        "model": one.row.get("model"),
        "gpu": one.row.get("gpu"),
        "kind": one.kind,
        "fitted": one.fitted,
        "figure": one.gauge or None,
        "measured": one.measured.get(one.gauge),
        "predicted": one.predicted.get(one.gauge),
        "error": one.error,
        "physics_error": plain.error,
        "all_measured": dict(one.measured),
        "all_predicted": dict(one.predicted),
        "reason": one.reason or None,
    }


def _reasons(pairs: Iterable[tuple[str, str]]) -> list[dict[str, Any]]:
    """Why rows were not predicted, the commonest first."""
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


def merged(summary: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {**summary, **more}
