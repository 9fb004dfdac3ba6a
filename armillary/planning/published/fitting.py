"""Fitting of the frameworks' two factors and of the width of intervals, from samples of measured rows.

A sample has all that a fit needs of a row: its measured step, its predicted step, and how much that grows with each
factor. So a fit sees no table, and can be given exactly the rows that it may see (benchmarks/planning_folds.py).

A framework's factors are shrunk towards those that the other frameworks have in common, and a framework with few rows
has only these.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from armillary.planning.device_model.vectorised_layouts import Array, Bools

NAMES = ("gemm", "attention")
"""the two factors of every framework"""
FACTORS = np.exp(np.linspace(np.log(0.8), np.log(1.6), 40))
"""factors that are tried, not quite two per cent apart"""
SHRINKAGE = 0.03
"""mean error that a factor must save per unit of its logarithm"""
FEWEST = 10
"""rows from which a framework has factors of its own"""
INSIDE = 0.9
"""share of rows that an interval is to contain"""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One measured row, as a fit sees it."""

    framework: str
    """without its release"""
    model: str
    measured_s: float
    """step time that the published figure means"""
    predicted_s: float
    """with every factor 1"""
    slopes: tuple[float, ...]
    """seconds added per unit of each factor of NAMES"""
    spread: float
    """relative uncertainty by the terms of the step (planning.training.uncertainty)"""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Factors by name: of each framework, and those that they have in common; and the half-width of intervals, in units
    of a prediction's spread, for frameworks with factors of their own and for the others."""

    frameworks: Mapping[str, Mapping[str, float]]
    common: Mapping[str, float]
    known_width: float
    unknown_width: float

    def numbers(self, framework: str) -> Mapping[str, float]:
        return self.frameworks.get(framework, self.common)

    def width(self, framework: str) -> float:
        return self.known_width if framework in self.frameworks else self.unknown_width


def fit(samples: Sequence[Sample]) -> Fit:
    """All factors and widths; the widths from predictions of models and sources that were left out in turn."""
    table = _Table(samples)
    frameworks = {name: table.own(name) for name in table.large()}
    rounded = {name: _named(values) for name, values in frameworks.items()}
    known, unknown = table.errors_by_model(), table.errors_by_framework()
    return Fit(
        frameworks=rounded,
        common=_named(table.common(table.everything)),
        known_width=_quantile(known),
        unknown_width=max(_quantile(unknown), _quantile(known)),
    )


def _named(values: tuple[float, ...]) -> dict[str, float]:
    return {name: round(float(value), 3) for name, value in zip(NAMES, values, strict=True)}


def _quantile(errors: Array) -> float:
    """The smallest width that contains the share INSIDE, corrected for the number of rows (split conformal)."""
    if not len(errors):
        return 2.0
    rank = min(len(errors) - 1, int(np.ceil(INSIDE * (len(errors) + 1))) - 1)
    return round(float(np.sort(errors)[rank]), 3)


class _Table:
    """Samples as columns."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.framework = np.array([sample.framework for sample in samples])
        self.model = np.array([f"{sample.framework} {sample.model}" for sample in samples])
        self.measured = np.array([sample.measured_s for sample in samples])
        self.predicted = np.array([sample.predicted_s for sample in samples])
        self.slopes = np.array([sample.slopes for sample in samples]).reshape(len(samples), len(NAMES))
        self.spread = np.array([sample.spread for sample in samples])
        self.priors: dict[str, tuple[float, ...]] = {}
        self.everything: Bools = np.ones(len(samples), dtype=np.bool_)

    def large(self, among: Bools | None = None) -> list[str]:
        """Frameworks with enough rows for factors of their own."""
        names = self.framework if among is None else self.framework[among]
        return sorted({name for name in names.tolist() if (names == name).sum() >= FEWEST})

    def common(self, among: Bools) -> tuple[float, ...]:
        """Factors of all frameworks, each model of each counted once."""
        models = self.model[among]
        weights = np.array([1 / (models == model).sum() for model in models.tolist()])
        return self._best(among, weights, (1.0,) * len(NAMES))

    def own(self, framework: str, among: Bools | None = None) -> tuple[float, ...]:
        """Factors of one framework, shrunk towards those of the others."""
        among = self.everything if among is None else among
        own = among & (self.framework == framework)
        return self._best(own, np.ones(own.sum()), self._prior(framework))

    def _prior(self, framework: str) -> tuple[float, ...]:
        """What the other frameworks have in common."""
        if framework not in self.priors:
            rest = self.framework != framework
            self.priors[framework] = self.common(rest) if rest.any() else (1.0,) * len(NAMES)
        return self.priors[framework]

    def errors_by_model(self) -> Array:
        """|ln(predicted / measured)| / spread of rows whose model was left out of their framework's fit."""
        errors = []
        for framework in self.large():
            for model in sorted(set(self.model[self.framework == framework].tolist())):
                left_out = self.model == model
                if framework in self.large(~left_out):
                    errors.append(self._errors(left_out, self.own(framework, ~left_out)))
        return np.concatenate(errors) if errors else np.zeros(0)

    def errors_by_framework(self) -> Array:
        """The same of rows whose framework was left out altogether."""
        errors = []
        for framework in sorted(set(self.framework.tolist())):
            left_out = self.framework == framework
            if not left_out.all():
                errors.append(self._errors(left_out, self.common(~left_out)))
        return np.concatenate(errors) if errors else np.zeros(0)

    def _errors(self, which: Bools, factors: tuple[float, ...]) -> Array:
        seconds = self.predicted[which] + self.slopes[which] @ (np.array(factors) - 1)
        return np.abs(np.log(seconds / self.measured[which])) / self.spread[which]

    def _best(self, which: Bools, weights: Array, prior: tuple[float, ...]) -> tuple[float, ...]:
        """The pair of FACTORS with the least mean error of the speed and distance from the prior."""
        first, second = (self.slopes[which, i][:, None] * (FACTORS - 1) for i in range(2))
        seconds = (self.predicted[which][:, None] + first)[:, :, None] + second[:, None, :]
        errors = np.abs(self.measured[which][:, None, None] / seconds - 1)
        loss = np.tensordot(weights / weights.sum(), errors, axes=1)
        distance = [np.abs(np.log(FACTORS / value)) for value in prior]
        loss += SHRINKAGE * (distance[0][:, None] + distance[1][None, :])
        i, j = np.unravel_index(int(np.argmin(loss)), loss.shape)
        return float(FACTORS[i]), float(FACTORS[j])
