"""Samples of published training rows for a fit: the predicted step, and how it depends on each fitted factor."""

from dataclasses import dataclass, replace

from armillary.planning.published.fitting import NAMES, Sample
from armillary.planning.published.row_case import Row
from armillary.planning.published.training_row import TrainingRow, measurement, predicted
from armillary.planning.training.step_time import step_time
from armillary.planning.training.uncertainty import spread

MORE = 0.25
"""growth of a factor with which its slope is priced"""


@dataclass(frozen=True, kw_only=True)
class PricedRow:
    """What is predicted of a row whatever it measured."""

    row: TrainingRow
    step_s: float
    """with every factor 1"""
    slopes: tuple[float, ...]
    """seconds added per unit of each factor of NAMES"""
    sensitivity: dict[str, float]
    """another plausible value of a setting that the row leaves open -> relative change of the step with it"""
    spread: float

    def sample(self, measured: Row) -> Sample | None:
        """With the figure that `measured` states; None where it states none."""
        figure = measurement(measured)
        if figure is None:
            return None
        of_one_second = predicted(self.row, figure.name, 1.0)
        framework = (self.row.row.get("framework") or "unknown").split(" ")[0]
        return Sample(
            framework=framework,
            model=family(self.row.row.get("model") or ""),
            measured_s=figure.value if figure.name == "step_s" else of_one_second / figure.value,
            predicted_s=self.step_s,
            slopes=self.slopes,
            spread=self.spread,
        )


def family(model: str) -> str:
    """The model without its task: 'LLAMA3_70B (SFT)' is LLAMA3_70B, so that leaving one out leaves out both."""
    return model.partition(" (")[0]


def price(row: TrainingRow) -> PricedRow:
    """A row's step without fitted factors, its slopes, sensitivity and spread."""
    case = replace(row.case, software=row.case.software.with_numbers({}))
    time = step_time(case, row.layouts)
    step = float(time.total[0])
    slopes = []
    for name in NAMES:
        slower = replace(case, software=case.software.with_numbers({name: 1 + MORE}))
        slopes.append((float(step_time(slower, row.layouts).total[0]) - step) / MORE)
    changes = {name: float(step_time(case, other).total[0]) / step - 1 for name, other in row.alternatives.items()}
    assumed = sum(change**2 for change in changes.values()) ** 0.5
    return PricedRow(
        row=row,
        step_s=step,
        slopes=tuple(slopes),
        sensitivity=changes,
        spread=float(spread(case, time, assumed)[0]),
    )
