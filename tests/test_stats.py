"""One definition of a percentile: what is predicted and what is measured are the same statistic."""

from __future__ import annotations

import pytest

from armillary.engine.bench import measure
from armillary.planning.simulation import request_stats
from armillary.serving.load import summary
from armillary.stats import estimate, fitted_slope, percentile


def test_a_percentile_is_the_nearest_rank() -> None:
    values = [float(i) for i in range(100, 0, -1)]
    assert percentile(values, 99) == 99.0 and percentile(values, 50) == 50.0 and percentile(values, 100) == 100.0
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0 and percentile([], 99) == 0.0


def test_weights_count_like_repeated_values() -> None:
    values, weights = [5.0, 1.0, 3.0], [1.0, 7.0, 2.0]
    repeated = [value for value, weight in zip(values, weights, strict=True) for _ in range(int(weight))]
    for percent in (1, 50, 70, 71, 90, 91, 99, 100):
        assert percentile(values, percent, weights) == percentile(repeated, percent)


def test_predicted_and_measured_percentiles_are_the_same_statistic() -> None:
    assert measure.percentile is request_stats.percentile is summary.percentile is percentile
    seconds = [0.001 * i for i in range(1, 101)]
    requests = [{"ttft_s": value, "queue_s": value} for value in seconds]
    steps = [{"engine_step_s": value, "decode_tokens": 3.0} for value in seconds]
    gauges = request_stats.served_gauges(steps, requests)
    for percent in (50, 90, 99):
        expected = percentile(seconds, percent)
        assert gauges[f"ttft_p{percent}_s"] == gauges[f"itl_p{percent}_s"] == expected
    assert gauges["ttft_p99_s"] == pytest.approx(0.099), "the 99th of 100 values and not the largest"


def test_intervals_are_student_s() -> None:
    assert estimate([1.0, 3.0]).half_width == pytest.approx(12.706, abs=1e-3)
    assert estimate([7.0]).half_width is None


def test_a_slope_knows_its_error() -> None:
    exact = fitted_slope([0.0, 1.0, 2.0, 3.0], [1.0, 3.0, 5.0, 7.0])
    assert exact.slope == pytest.approx(2.0) and exact.error == pytest.approx(0.0, abs=1e-12)
    noisy = fitted_slope([0.0, 1.0, 2.0, 3.0], [1.0, 0.0, 1.0, 0.0])
    assert noisy.error == pytest.approx((0.8 / 2 / 5) ** 0.5) and noisy.slope == pytest.approx(-0.2)
