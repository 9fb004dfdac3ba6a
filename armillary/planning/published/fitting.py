"""Fitting: the one or two numbers of a framework, on half of its published rows, judged on the other half.

Rows whose config_id ends in an even hex digit fit, the others judge. The search is by turns along each number, in
logarithms, for the least mean absolute error: simple, and there are at most two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from armillary.planning.published.training_row import TrainingRow, measurement, predicted
from armillary.planning.training.step_time import step_time

LOW, HIGH = 0.5, 8.0
ROUNDS, STEPS = 3, 10
_GOLDEN = (5**0.5 - 1) / 2


def is_fitted_on(config_id: str) -> bool:
    """Whether a row belongs to the half that fits: its id ends in an even hex digit."""
    last = config_id.strip().lower()[-1:]
    return last in "02468ace" and last != ""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Numbers found, and their errors on both halves."""

    numbers: Mapping[str, float]
    """parameter -> factor on its time"""
    fitted_error: float
    """mean absolute error of the rows that fitted"""
    other_error: float
    """of the others"""


def row_error(row: TrainingRow, numbers: Mapping[str, float]) -> float:
    """Signed relative error of one row with these numbers: predicted / measured − 1, of the published figure."""
    found = measurement(row.row)
    assert found is not None, "rows without a measurement cannot fit"
    software = row.case.software.with_numbers(numbers)
    seconds = float(step_time(replace(row.case, software=software), row.layouts).total[0])
    return predicted(row, found.name, seconds) / found.value - 1


def fit(rows: Sequence[TrainingRow], names: Sequence[str]) -> Fit:
    """The best factors for `names` on the even half of `rows`."""
    mine = [row for row in rows if is_fitted_on(row.row["config_id"])]
    others = [row for row in rows if not is_fitted_on(row.row["config_id"])]

    def loss(numbers: Mapping[str, float], which: Sequence[TrainingRow] = mine) -> float:
        return float(np.mean([abs(row_error(row, numbers)) for row in which])) if which else 0.0

    numbers = dict.fromkeys(names, 1.0)
    for _ in range(ROUNDS if len(names) > 1 else 1):
        for name in names:
            numbers[name] = _best(lambda value, name=name: loss(numbers | {name: value}))  # type: ignore[misc]
    numbers = {name: round(value, 3) for name, value in numbers.items()}
    return Fit(numbers=numbers, fitted_error=loss(numbers), other_error=loss(numbers, others))


def _best(loss: Callable[[float], float]) -> float:
    """Golden-section search in the logarithm."""
    low, high = np.log(LOW), np.log(HIGH)
    first, second = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_first, at_second = loss(float(np.exp(first))), loss(float(np.exp(second)))
    for _ in range(STEPS):
        if at_first <= at_second:
            high, second, at_second = second, first, at_first
            first = high - _GOLDEN * (high - low)
            at_first = loss(float(np.exp(first)))
        else:
            low, first, at_first = first, second, at_second
            second = low + _GOLDEN * (high - low)
            at_second = loss(float(np.exp(second)))
    return float(np.exp((low + high) / 2))
