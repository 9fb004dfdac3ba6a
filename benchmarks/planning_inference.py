"""Holds the serving predictor against published measurements, and fits what engines declare.

    python benchmarks/planning_inference.py published_inference.csv            the error table, fitted and physics only;
                                                                               exits with 1 above 13 % mean error
    python benchmarks/planning_inference.py published_inference.csv --fit      the parameters of engines.toml again

Parameters are fitted on rows whose config id ends in an even hex digit; errors are quoted on the others.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import mean, median

import numpy as np

from armillary.planning.published.inference_row import InferenceRow, config_id, engine_name, inference_row
from armillary.planning.published.inference_table import InferencePrediction, error_of, predict_row, predict_rows
from armillary.planning.published.row_case import Row, is_fitted_on
from armillary.planning.published.table import matches
from armillary.planning.serving.engines import Engine, engine_for, engines, physics

FITTED_KINDS = ("static batch", "batch 1", "closed loop", "max load")


def read(path: str) -> list[dict[str, str]]:
    with Path(path).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


# --- fitting


def fitted(engine: Engine, rows: Iterable[Row]) -> dict[str, float]:
    """The engine's continuous parameters that make the mean absolute error of the even half smallest."""
    mine = [row for row in rows if engine_for(engine_name(row)) == engine and is_fitted_on(config_id(row))]
    mine = [row for row in mine if matches(row, "complete") and not predict_row(row).reason]
    found = [(row, inference_row(row)) for row in mine]
    found = [(row, case) for row, case in found if case.kind in FITTED_KINDS]
    names = list(engine.parameters)

    if not found:
        return dict(engine.parameters)

    def loss(logs: np.ndarray) -> float:
        named = _named(names, logs)
        return mean(abs(_error(row, _with_rates(case, named))) for row, case in found)

    start = np.log([engine.parameters[name] for name in names])
    best = nelder_mead(loss, start)
    return {name: float(f"{value:.3g}") for name, value in _named(names, best).items()}


def _with_rates(case: InferenceRow, named: Mapping[str, float]) -> InferenceRow:
    return replace(case, replica=replace(case.replica, rates=replace(physics(), **named)))


def _named(names: list[str], logs: np.ndarray) -> dict[str, float]:
    return {name: float(np.exp(value)) for name, value in zip(names, logs, strict=True)}


def _error(row: Row, case: InferenceRow) -> float:
    error = error_of(row, case)
    assert error is not None
    return error


def nelder_mead(loss: Callable[[np.ndarray], float], start: np.ndarray, rounds: int = 80) -> np.ndarray:
    """The simplex method (Nelder & Mead 1965): no derivatives, two or three parameters."""
    points = [start, *(start + 0.2 * axis for axis in np.eye(len(start)))]
    values = [loss(point) for point in points]
    for _ in range(rounds):
        order = np.argsort(values)
        points, values = [points[i] for i in order], [values[i] for i in order]
        centre = np.mean(points[:-1], axis=0)
        for step in (2.0, 1.0, 0.5, -0.5):
            point = centre + step * (centre - points[-1])
            value = loss(point)
            if value < values[-1 if abs(step) < 1 else (-2 if step == 1 else 0)]:
                points[-1], values[-1] = point, value
                break
        else:
            points = [points[0], *(points[0] + 0.5 * (point - points[0]) for point in points[1:])]
            values = [values[0], *(loss(point) for point in points[1:])]
    return points[int(np.argmin(values))]


# --- reporting


def report(rows: list[dict[str, str]]) -> int:
    fitted, plain = predict_rows(rows), predict_rows(rows, physics_only=True)
    print("| source | what | rows | predicted | mean error | median | bias | worst | physics only, mean |")
    print("|---|---|---:|---:|---:|---:|---:|---:|---:|")
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for i, one in enumerate(fitted):
        groups[(one.row.get("engine", ""), one.kind or "not predicted")].append(i)
    for (engine, kind), index in sorted(groups.items()):
        quoted = [i for i in index if not may_be_fitted(fitted[i])]
        half = " (odd half)" if quoted != index else ""
        print(line(engine, kind + half, [fitted[i] for i in quoted], [plain[i] for i in quoted]))
    print(f"\nRows not fitted: {len(not_fitted(fitted))}, mean error {mean_of(not_fitted(fitted)):.1%}")
    reasons: Mapping[str, int] = defaultdict(int)
    for one in fitted:
        if one.reason:
            reasons[one.reason] += 1  # type: ignore[index]
    print("\nNot predicted:")
    print("\n".join(f"- {count} × {reason}" for reason, count in reasons.items()))
    broken = [name for name, holds in bounds(fitted).items() if not holds]
    print("\n" + (f"worse than stated: {', '.join(broken)}" if broken else "all stated bounds hold"))
    return 1 if broken else 0


def may_be_fitted(row: InferencePrediction) -> bool:
    """Whether the engine's parameters were fitted with this row in view: an even id, in the table of its fit (rows of
    the tables in this folder say whether they are complete, the shared table has no such column)."""
    engine = engine_for(engine_name(row.row))
    own = engine is not None and ("unseen_" in engine.command) == ("complete" in row.row)
    return row.fitted and row.kind in FITTED_KINDS and own


def not_fitted(predictions: Iterable[InferencePrediction]) -> list[InferencePrediction]:
    return [row for row in predictions if row.error is not None and not may_be_fitted(row)]


def mean_of(predictions: Iterable[InferencePrediction]) -> float:
    return mean(abs(row.error) for row in predictions if row.error is not None)


def bounds(predictions: list[InferencePrediction]) -> dict[str, bool]:
    """What planning_inference.md states -> whether it holds: errors of the rows that were not fitted, and of all."""

    def error(kind: str, engine: str, only_held_out: bool) -> float:
        rows = [row for row in predictions if row.kind == kind and row.framework.startswith(engine)]
        return mean(abs(row.error) for row in rows if row.error is not None and not (only_held_out and row.fitted))

    return {
        "13 % on rows not fitted": mean_of(not_fitted(predictions)) <= 0.13,
        "static batch 15 %": max(error("static batch", "TensorRT-LLM", True), error("static batch", "", False)) <= 0.15,
        "batch 1 15 %": max(error("batch 1", "gpt-fast", True), error("batch 1", "gpt-fast", False)) <= 0.15,
        "95 % of rows predicted": sum(row.error is not None for row in predictions) >= 0.95 * len(predictions),
    }


def line(engine: str, kind: str, fitted: list[InferencePrediction], plain: list[InferencePrediction]) -> str:
    errors = [one.error for one in fitted if one.error is not None]
    others = [abs(one.error) for one in plain if one.error is not None]
    if not errors:
        return f"| {engine} | {kind} | {len(fitted)} | 0 | | | | | |"
    worst = max(errors, key=abs)
    cells = [mean(map(abs, errors)), median(map(abs, errors)), mean(errors), worst, mean(others)]
    shown = " | ".join(f"{cell * 100:+.1f} %" if i in (2, 3) else f"{cell * 100:.1f} %" for i, cell in enumerate(cells))
    return f"| {engine} | {kind} | {len(fitted)} | {len(errors)} | {shown} |"


def main(table: str, *, fit: bool) -> int:
    rows = read(table)
    if fit:
        for name, engine in engines().items():
            if not any(engine_for(engine_name(row)) == engine for row in rows):
                continue
            print(f"[engine.{name}]\nparameters = {fitted(engine, rows)}".replace("'", "").replace(":", " ="))
        return 0
    return report(rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", help="published_inference.csv")
    parser.add_argument("--fit", action="store_true", help="fit the parameters of engines.toml again")
    sys.exit(main(**vars(parser.parse_args())))
