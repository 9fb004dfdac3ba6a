"""Nodes and devices that a routed row is sent to: the formula against routing drawn at random."""

from __future__ import annotations

import numpy as np
import pytest

from armillary.planning.device_model.network import distinct_units

EXPERTS, TOP = 256, 8


@pytest.mark.parametrize(("groups", "reached"), [(1, 1), (8, 4)])
@pytest.mark.parametrize("units", [2, 8, 64])
def test_as_many_units_as_random_rows_need(units: int, groups: int, reached: int) -> None:
    dice, each, counts = np.random.default_rng(0), EXPERTS // groups, []
    for _ in range(1500):
        first = dice.choice(groups, reached, replace=False) * each
        allowed = (first[:, None] + np.arange(each)).ravel()
        counts.append(len(set(dice.choice(allowed, TOP, replace=False) // (EXPERTS // units))))
    predicted = float(distinct_units(np.array([float(units)]), TOP, groups, reached)[0])
    assert predicted == pytest.approx(np.mean(counts), rel=0.04)
