"""Uncertainty of a predicted step: how far its terms may be off, and the interval that follows.

Each term of a step has a relative uncertainty of its own, and a step is as uncertain as the terms it consists of: a
step of GEMMs is surer than one of exposed communication. The terms are taken as independent; one width, fitted on
published runs that the prediction had not seen, turns the spread into an interval that contains 90 % of them.
"""

from dataclasses import dataclass

import numpy as np

from armillary.planning.device_model.vectorised_layouts import Array
from armillary.planning.training.step_time import StepTime
from armillary.planning.training.train_case import TrainCase

GEMM, ATTENTION, MEMORY, COMMUNICATION, BUBBLE, OVERHEAD = 0.06, 0.15, 0.2, 0.35, 0.25, 0.5
"""relative uncertainty of each term: judged by how much kernels and libraries differ, not fitted"""
EXPERTS = 0.12
"""relative uncertainty of a step with routed experts: their kernels differ most between releases"""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """90 % interval of a predicted quantity."""

    low: float
    high: float

    def contains(self, value: float) -> bool:
        return self.low <= value <= self.high


def spread(case: TrainCase, time: StepTime, assumed: float = 0.0) -> Array:
    """Relative uncertainty of every layout's step; `assumed` is the relative effect of settings that were assumed."""
    terms = [
        (GEMM, time.gemm + time.recompute),
        (ATTENTION, time.attention),
        (MEMORY, time.memory + time.contention),
        (COMMUNICATION, time.exposed),
        (BUBBLE, time.bubble),
        (OVERHEAD, time.overhead),
    ]
    total = time.total
    squares = sum(((share * term / total) ** 2 for share, term in terms), np.zeros_like(total))
    experts = EXPERTS * case.model.num_moe_layers / case.model.num_layers
    return np.sqrt(squares + experts**2 + (assumed / 2) ** 2)


def interval(value: float, spread: float, width: float) -> Interval:
    """value · exp(± width · spread)."""
    factor = float(np.exp(width * spread))
    return Interval(low=value / factor, high=value * factor)
