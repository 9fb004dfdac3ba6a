"""Values of a column are told apart as numpy's unique does, whether they are counted or sorted."""

from __future__ import annotations

import numpy as np
import pytest

from armillary.planning.device_model import vectorised_layouts
from armillary.planning.device_model.vectorised_layouts import distinct


@pytest.mark.parametrize("spread", [2, 40, 3_000, 2**40])
@pytest.mark.parametrize("size", [0, 1, 2, 500])
def test_as_numpy_does(size: int, spread: int) -> None:
    column = np.random.default_rng(spread + size).integers(-spread, spread, size)
    first, back = distinct(column)
    _, first_of_each, inverse = np.unique(column, return_index=True, return_inverse=True)
    assert (first == first_of_each).all() and (back == inverse).all()


def test_counted_and_sorted_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    column = np.random.default_rng(0).integers(0, 60, 400)
    counted = distinct(column)
    monkeypatch.setattr(vectorised_layouts, "SPREAD", 0)
    assert all((one == other).all() for one, other in zip(counted, distinct(column), strict=True))
