"""Checkpoint intervals and goodput: textbook values, the exact optimum, and what can never happen."""

from __future__ import annotations

from math import sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from armillary.errors import BadInput
from armillary.planning.cost.failures import (
    Failures,
    best_interval_s,
    daly_s,
    expected_goodput,
    goodput,
    of_cluster,
    per_month,
    young_s,
)
from armillary.spec import catalogue

costs = st.floats(1.0, 600.0)
mtbfs = st.floats(1e5, 1e10)


def case(devices: int = 1, mtbf_s: float = 86400.0, checkpoint_s: float = 300.0, restart_s: float = 600.0) -> Failures:
    return Failures(num_devices=devices, device_mtbf_s=mtbf_s, checkpoint_s=checkpoint_s, restart_s=restart_s)


def test_young_of_a_day_between_failures_and_five_minutes_a_checkpoint() -> None:
    assert young_s(case()) == pytest.approx(sqrt(2 * 300 * 86400)) == pytest.approx(7200)


def test_daly_is_young_for_cheap_checkpoints_and_the_mtbf_for_absurd_ones() -> None:
    assert daly_s(case(checkpoint_s=0.1)) == pytest.approx(young_s(case(checkpoint_s=0.1)), rel=0.01)
    assert daly_s(case(mtbf_s=100.0, checkpoint_s=250.0)) == 100.0


def test_llama_3_as_published() -> None:
    """419 unexpected interruptions in 54 days on 16,384 devices: 7.8 a day (arXiv 2407.21783, table 5)."""
    found = expected_goodput(of_cluster(catalogue.cluster("h100x16384"), checkpoint_s=30))
    assert found.interruptions_per_day == pytest.approx(419 / 54, rel=0.02)
    assert 0.8 < found.goodput_fraction < 0.95


@given(mtbfs, costs, st.floats(0.3, 3.0))
def test_no_interval_beats_the_best(mtbf_s: float, checkpoint_s: float, other: float) -> None:
    failures = case(mtbf_s=mtbf_s, checkpoint_s=checkpoint_s)
    best = best_interval_s(failures)
    assert goodput(failures, best) >= goodput(failures, best * other) * (1 - 1e-9)


@given(mtbfs, costs)
def test_daly_comes_close_to_the_exact_optimum(mtbf_s: float, checkpoint_s: float) -> None:
    failures = case(mtbf_s=mtbf_s, checkpoint_s=checkpoint_s)
    assert daly_s(failures) == pytest.approx(best_interval_s(failures), rel=0.01)


@given(st.integers(1, 100_000), st.integers(1, 100_000), costs)
def test_more_devices_never_raise_goodput(few: int, more: int, checkpoint_s: float) -> None:
    counts = sorted((few, few + more))
    kept = [expected_goodput(case(count, 1e8, checkpoint_s)).goodput_fraction for count in counts]
    assert kept[1] <= kept[0] * (1 + 1e-9)


@given(costs, st.floats(0, 1e5), st.floats(1, 1e4))
def test_dearer_interruptions_never_raise_goodput(checkpoint_s: float, restart_s: float, more: float) -> None:
    cheap = expected_goodput(case(1000, 1e8, checkpoint_s, restart_s)).goodput_fraction
    assert expected_goodput(case(1000, 1e8, checkpoint_s + more, restart_s)).goodput_fraction <= cheap * (1 + 1e-9)
    assert expected_goodput(case(1000, 1e8, checkpoint_s, restart_s + more)).goodput_fraction <= cheap * (1 + 1e-9)


@given(st.integers(1, 50_000), costs, st.floats(0, 3600))
def test_what_is_lost_and_what_is_kept_make_the_whole(devices: int, checkpoint_s: float, restart_s: float) -> None:
    found = expected_goodput(case(devices, 1e8, checkpoint_s, restart_s))
    shares = [found.goodput_fraction, *found.lost().values()]
    assert sum(shares) == pytest.approx(1) and min(shares) >= -1e-9


def test_a_monthly_chance_as_a_rate() -> None:
    assert per_month(0.2) == pytest.approx(3.06e-4, rel=0.01)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_devices": 0}, "0 devices cannot train"),
        ({"device_mtbf_s": 0.0}, "mean time between failures of 0.0 s is not a time"),
        ({"checkpoint_s": -1.0}, "checkpoint time of -1.0 s is not a time"),
        ({"restart_s": float("nan")}, "restart time of nan s is not a time"),
    ],
)
def test_nonsense_is_refused(change: dict[str, float], message: str) -> None:
    values: dict[str, float] = {"num_devices": 8, "checkpoint_s": 30.0, **change}
    with pytest.raises(BadInput, match=message):
        Failures(**values)  # type: ignore[arg-type]
