"""A source with a bug, in a module without torch: worker processes import it."""

from dataclasses import dataclass

import numpy as np

from armillary.training.data.batch import LAYOUT, Batch


@dataclass(frozen=True)
class Failing:
    """A source that fails at one step."""

    sequence: int = 4
    batch: int = 2
    steps_per_epoch: float = 1.0

    def at(self, step: int, *, rank: int = 0, world: int = 1) -> Batch:
        if step == 2:
            raise ZeroDivisionError("a bug")
        return Batch(**{name: np.full((2, 4), step, dtype) for name, dtype in LAYOUT.items()})
