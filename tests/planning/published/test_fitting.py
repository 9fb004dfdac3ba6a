"""Fits: planted factors are found, few rows change little, and intervals contain what they promise."""

from __future__ import annotations

import numpy as np
import pytest

from armillary.planning.published.fitting import INSIDE, Sample, fit


def samples(framework: str, count: int, factors: tuple[float, float], noise: float, seed: int) -> list[Sample]:
    """Rows of four models whose GEMMs and attention take `factors` as long as predicted."""
    random = np.random.default_rng(seed)
    found = []
    for i in range(count):
        gemm, attention = random.uniform(0.3, 0.6), random.uniform(0.05, 0.35)
        true = 1.0 + gemm * (factors[0] - 1) + attention * (factors[1] - 1)
        measured = true * float(np.exp(random.normal(0, noise)))
        found.append(
            Sample(
                framework=framework,
                model=f"model {i % 4}",
                measured_s=measured,
                predicted_s=1.0,
                slopes=(gemm, attention),
                spread=0.1,
            )
        )
    return found


def test_planted_factors_are_found() -> None:
    found = fit([*samples("one", 60, (1.05, 1.3), 0.01, 0), *samples("two", 60, (1.1, 1.0), 0.01, 1)])
    assert found.frameworks["one"]["gemm"] == pytest.approx(1.05, abs=0.03)
    assert found.frameworks["one"]["attention"] == pytest.approx(1.3, abs=0.06)
    assert 0.95 < found.frameworks["two"]["attention"] < 1.15, "shrunk towards the other's, not to it"


def test_a_framework_with_few_rows_has_what_the_others_have_in_common() -> None:
    found = fit([*samples("many", 40, (1.1, 1.1), 0.01, 0), *samples("few", 5, (1.5, 1.5), 0.01, 1)])
    assert "few" not in found.frameworks and found.numbers("few") == found.common
    assert found.width("few") == found.unknown_width >= found.known_width == found.width("many")


def test_intervals_contain_nine_of_ten_rows_that_the_fit_has_not_seen() -> None:
    rows = [*samples("one", 80, (1.05, 1.1), 0.08, 2), *samples("two", 80, (1.05, 1.1), 0.08, 3)]
    unseen = samples("one", 400, (1.05, 1.1), 0.08, 4)
    found = fit(rows)
    numbers = found.numbers("one")
    inside = [
        abs(np.log((1 + np.dot(row.slopes, [numbers["gemm"] - 1, numbers["attention"] - 1])) / row.measured_s))
        <= found.width("one") * row.spread
        for row in unseen
    ]
    assert float(np.mean(inside)) == pytest.approx(INSIDE, abs=0.06)
