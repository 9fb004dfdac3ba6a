"""Send times: as many as asked for, spaced as asked for."""

from __future__ import annotations

from itertools import pairwise
from statistics import mean, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from armillary.serving.load.schedule import send_times
from armillary.spec.tables.traffic import Traffic


def variation(times: list[float]) -> float:
    gaps = [after - before for before, after in pairwise(times)]
    return pstdev(gaps) / mean(gaps)


def test_constant_is_even() -> None:
    times = send_times(Traffic(requests_per_s=4, arrival="constant"), seconds=2.0)
    assert times == pytest.approx([0.125, 0.375, 0.625, 0.875, 1.125, 1.375, 1.625, 1.875])


def test_gaps_vary_as_the_process_says() -> None:
    poisson = send_times(Traffic(requests_per_s=50), seconds=200)
    bursts = send_times(Traffic(requests_per_s=50, arrival="gamma", burstiness=3.0), seconds=200)
    smooth = send_times(Traffic(requests_per_s=50, arrival="gamma", burstiness=0.3), seconds=200)
    assert variation(poisson) == pytest.approx(1.0, abs=0.05)
    assert variation(bursts) == pytest.approx(3.0, abs=0.35)
    assert variation(smooth) == pytest.approx(0.3, abs=0.03)


def test_a_ramp_from_10_to_30_sends_a_quarter_more_than_the_mean_in_its_second_half() -> None:
    times = send_times(Traffic(requests_per_s=10), seconds=100, ramp_to=30)
    assert len(times) == 2000
    assert sum(at >= 50 for at in times) == pytest.approx(1250, abs=80)  # half of the time at 20 to 30: 25 on average


@given(
    rate=st.floats(0.1, 500),
    seconds=st.floats(0.5, 20),
    ramp=st.none() | st.floats(0.1, 500),
    arrival=st.sampled_from(["poisson", "gamma", "constant"]),
    seed=st.integers(0, 9),
)
def test_any_process_offers_the_area_under_its_rate(
    rate: float, seconds: float, ramp: float | None, arrival: str, seed: int
) -> None:
    traffic = Traffic(requests_per_s=rate, arrival=arrival, burstiness=2.0)  # type: ignore[arg-type]
    times = send_times(traffic, seconds=seconds, ramp_to=ramp, seed=seed)
    assert len(times) == round(seconds * (rate + (ramp or rate)) / 2)
    assert times == sorted(times) and all(0 <= at <= seconds for at in times)


def test_a_count_takes_as_long_as_it_takes() -> None:
    times = send_times(Traffic(requests_per_s=5), seconds=1.0, count=100)
    assert len(times) == 100 and 15 < times[-1] <= 20
