"""Amdahl's law."""

from __future__ import annotations

from math import inf

import pytest

from armillary.errors import BadInput
from armillary.profiling.analysis.amdahl import amdahl, speedup


def test_eighty_percent_twice_as_fast() -> None:
    assert speedup(0.8, 2) == pytest.approx(1.6667, abs=1e-4)
    row = amdahl({"norm": 0.2, "gemm": 0.8})[0]
    assert (row.work, row.ceiling, row.doubled) == ("gemm", pytest.approx(5), pytest.approx(1 / 0.6))


def test_the_ends() -> None:
    assert speedup(0, 10) == 1 and speedup(1, 4) == 4 and speedup(1, inf) == inf


@pytest.mark.parametrize(("fraction", "factor"), [(80, 2), (-0.1, 2), (0.5, 0), (0.5, -1), (float("nan"), 2)])
def test_nonsense_is_refused(fraction: float, factor: float) -> None:
    with pytest.raises(BadInput):
        speedup(fraction, factor)


def test_shares_of_more_than_one_whole() -> None:
    with pytest.raises(BadInput, match="add up"):
        amdahl({"a": 0.8, "b": 0.8})
