"""Fitting of a framework's one or two factors on half of its published rows, judged on the other half.

Rows whose config_id ends in an even hex digit fit, the others judge. Coordinate descent in the logarithm minimises the
mean absolute error, which is simple, and there are at most two factors.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from armillary.planning.published.row_case import is_fitted_on
from armillary.planning.published.training_row import TrainingRow, measurement, predicted
from armillary.planning.training.step_time import step_time

LOW, HIGH = 0.5, 8.0
ROUNDS, TOLERANCE = 3, 0.01
"""passes over the factors, and the tolerance of a factor's logarithm"""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Fitted factors by parameter, and their mean absolute errors on the rows of the fit and on the others."""

    numbers: Mapping[str, float]
    fitted_error: float
    other_error: float


def row_error(row: TrainingRow, numbers: Mapping[str, float]) -> float:
    """Relative error of one row with these factors: predicted / measured − 1 of the published figure."""
    published = measurement(row.row)
    assert published is not None, "rows without a measurement cannot fit"
    software = row.case.software.with_numbers(numbers)
    seconds = float(step_time(replace(row.case, software=software), row.layouts).total[0])
    return predicted(row, published.name, seconds) / published.value - 1


def fit(rows: Sequence[TrainingRow], names: Sequence[str]) -> Fit:
    """The best factors for `names` on the even half of `rows`."""
    from scipy.optimize import minimize_scalar  # slow to import

    fitting = [row for row in rows if is_fitted_on(row.row["config_id"])]
    held_out = [row for row in rows if not is_fitted_on(row.row["config_id"])]

    def loss(numbers: Mapping[str, float], which: Sequence[TrainingRow] = fitting) -> float:
        return float(np.mean([abs(row_error(row, numbers)) for row in which])) if which else 0.0

    numbers = dict.fromkeys(names, 1.0)
    for _ in range(ROUNDS if len(names) > 1 else 1):
        for name in names:
            best = minimize_scalar(
                lambda log, name=name: loss(numbers | {name: float(np.exp(log))}),
                bounds=(np.log(LOW), np.log(HIGH)),
                method="bounded",
                options={"xatol": TOLERANCE},
            )
            numbers[name] = float(np.exp(best.x))
    numbers = {name: round(value, 3) for name, value in numbers.items()}
    return Fit(numbers=numbers, fitted_error=loss(numbers), other_error=loss(numbers, held_out))
