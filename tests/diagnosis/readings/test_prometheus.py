"""Metrics pages: lines, labels, and percentiles of histograms."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from armillary.diagnosis.readings.prometheus import Histogram, parse_page

PAGE = """# HELP requests_total what it is
# TYPE requests_total counter
requests_total{engine="0",note="a } \\"quoted\\" value"} 4.0
requests_total{engine="1"} 6.0 1790347303000
torn_line{engine="0
not_a_number{engine="0"} NaN
big 4.1367205e+07
wait_seconds_bucket{le="0.1"} 4
wait_seconds_bucket{le="1.0"} 9
wait_seconds_bucket{le="+Inf"} 12
wait_seconds_sum 6
wait_seconds_count 12
"""


def test_samples_of_all_labels_together_and_broken_lines_passed_over() -> None:
    page = parse_page(PAGE)
    assert page.total("requests_total") == 10 and page.mean("requests_total") == 5
    assert page.labels("requests_total")["note"] == 'a } "quoted" value'
    assert page.total("big") == 41367205.0
    assert "torn_line" not in page and "not_a_number" not in page


def test_ranks_that_say_the_same_are_counted_once() -> None:
    page = parse_page('x{tp_rank="0",dp_rank="0"} 3\nx{tp_rank="1",dp_rank="0"} 3\nx{tp_rank="0",dp_rank="1"} 4\n')
    assert page.total("x") == 7


def test_a_histogram_interpolates_as_prometheus_does() -> None:
    histogram = parse_page(PAGE).histogram("wait_seconds")
    assert histogram == Histogram((0.1, 1.0, inf), (4.0, 9.0, 12.0), 6.0)
    assert histogram.mean == 0.5
    assert histogram.quantile(0.25) == pytest.approx(0.1 * 3 / 4)
    assert histogram.quantile(0.5) == pytest.approx(0.1 + 0.9 * 2 / 5)
    assert histogram.quantile(0.99) == 1.0, "beyond the last bound: that bound"


def test_a_sum_and_a_count_alone_have_a_mean() -> None:
    histogram = parse_page("x_sum 10\nx_count 4\n").histogram("x")
    assert histogram is not None and histogram.mean == 2.5
    assert parse_page("x_sum 10\n").histogram("x") is None
    assert Histogram((inf,), (0.0,), 0.0).mean is None


@given(st.lists(st.floats(0.001, 99.0), min_size=1), st.floats(0.01, 1.0))
def test_a_percentile_lies_in_the_bucket_that_holds_it(values: list[float], share: float) -> None:
    bounds = (0.01, 0.1, 1.0, 10.0, 100.0, inf)
    counts = tuple(float(sum(value <= bound for value in values)) for bound in bounds)
    found = Histogram(bounds, counts, sum(values)).quantile(share)
    exact = sorted(values)[max(0, -int(-share * len(values) // 1) - 1)]
    bucket = next(index for index, bound in enumerate(bounds) if exact <= bound)
    low = bounds[bucket - 1] if bucket else 0.0
    assert found is not None and low - 1e-9 <= found <= bounds[bucket] * (1 + 1e-9)


def test_what_was_added_between_two_looks() -> None:
    before, after = Histogram((1.0, inf), (3.0, 4.0), 5.0), Histogram((1.0, inf), (3.0, 9.0), 25.0)
    assert after.since(before) == Histogram((1.0, inf), (0.0, 5.0), 20.0)


@given(st.lists(st.floats(0.002, 0.008), min_size=3), st.lists(st.floats(0.1, 0.28), min_size=2, max_size=9))
def test_two_kinds_of_values_are_told_apart(short: list[float], long: list[float]) -> None:
    """The sum is known, so the lower kind's mean is off by no more than what the upper buckets hide."""
    bounds = (0.01, 0.025, 0.05, 0.1, 0.15, 0.2, 0.3, inf)
    values = short + long
    counts = tuple(float(sum(value <= bound for value in values)) for bound in bounds)
    found = Histogram(bounds, counts, sum(values)).lower_group(3.0)
    assert found is not None and 0.0 <= found <= 0.01
    assert found == pytest.approx(sum(short) / len(short), abs=0.05 * len(long) / len(short) + 1e-9)


def test_values_of_one_kind_are_not_split() -> None:
    assert Histogram((0.01, 0.025, 0.05, inf), (5.0, 90.0, 95.0, 95.0), 1.6).lower_group(3.0) is None
    assert Histogram((0.01, inf), (5.0, 5.0), 0.02).lower_group(3.0) is None
    assert Histogram((inf,), (0.0,), 0.0).lower_group(3.0) is None
