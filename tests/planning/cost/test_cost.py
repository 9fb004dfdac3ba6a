"""Prices, owned hardware, break-even, cost a step and a million tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from armillary.errors import BadInput, NotFound
from armillary.planning.cost.cost import device_hour, offers, serving_cost, spot_goodput, training_cost
from armillary.planning.cost.ownership import Owned, owned
from armillary.spec import catalogue
from armillary.spec.tables.traffic import Cost

H100 = catalogue.cluster("h100x64")
ONE = Owned(capex_usd=40_000, years=4, power_w=1000, pue=1.25, usd_per_kwh=0.1, staff_usd_per_year=0)
prices = st.floats(0.1, 100)


# --- arithmetic by hand


def test_a_step_a_run_and_a_million_tokens() -> None:
    found = training_cost(step_s=36, batch_tokens=4_000_000, steps=1000, num_devices=100, usd_per_device_hour=2.0)
    assert found.step_usd == pytest.approx(2.0)  # 100 devices · 2 $/h · 0.01 h
    assert found.run_usd == pytest.approx(2000)
    assert found.million_trained_tokens_usd == pytest.approx(0.5)
    assert found.run_s == pytest.approx(36_000)


def test_lost_time_is_paid_for() -> None:
    whole = {"step_s": 1.0, "batch_tokens": 1000, "steps": 10, "num_devices": 8, "usd_per_device_hour": 3.0}
    assert training_cost(**whole, goodput=0.5).run_usd == pytest.approx(2 * training_cost(**whole).run_usd)  # type: ignore[arg-type]


def test_a_million_tokens_served() -> None:
    found = serving_cost(
        num_devices=8, usd_per_device_hour=4.5, tokens_in_per_s=8000, tokens_out_per_s=2000, prefill_fraction=0.4
    )
    assert found.million_tokens_usd == pytest.approx(1.0)  # 36 $/h over 36 M tokens an hour
    assert found.million_in_usd * 8000 + found.million_out_usd * 2000 == pytest.approx(1.0 * 10_000)
    assert found.million_in_usd == pytest.approx(0.5) and found.million_out_usd == pytest.approx(3.0)


def test_an_owned_hour() -> None:
    """10,000 $ a year written off, 1.25 kW at 0.1 $/kWh: always in use 1.142 + 0.125 $ an hour."""
    assert ONE.usd_per_hour(1.0) == pytest.approx(10_000 / 8760 + 0.125)
    assert ONE.usd_per_hour(0.5) == pytest.approx(20_000 / 8760 + 0.125 * 0.65 / 0.5)  # idle draws 30 %


def test_break_even_month_and_utilisation() -> None:
    month = ONE.break_even_month(1.0, 2.0)
    assert month == pytest.approx(40_000 / (730 * (2.0 - 0.125)))
    use = ONE.break_even_utilisation(2.0)
    assert use is not None and ONE.usd_per_hour(use) == pytest.approx(2.0)
    assert ONE.break_even_month(1.0, 1.0) is None, "never within the four years"
    assert ONE.break_even_utilisation(0.5) is None


# --- catalogue


def test_prices_of_the_catalogue() -> None:
    rented = device_hour(Cost(), H100)
    assert rented.name == "on demand" and 2 < rented.usd_per_hour < 8
    assert device_hour(Cost(provider="lambda"), H100).usd_per_hour != rented.usd_per_hour
    assert device_hour(Cost(usd_per_device_hour=1.23), H100).usd_per_hour == 1.23
    assert device_hour(Cost(owned=True), H100).name == "owned"


def test_every_way_is_compared_by_what_a_useful_hour_costs() -> None:
    found = offers(Cost(), H100)
    assert {"on demand", "reserved 1 y", "reserved 3 y", "spot", "owned"} == {offer.name for offer in found}
    hours = [offer.usd_per_useful_hour for offer in found]
    assert hours == sorted(hours)
    spot = next(offer for offer in found if offer.name == "spot")
    assert spot.usd_per_useful_hour > spot.usd_per_hour, "interruptions cost time"


def test_spot_machines_that_are_interrupted_all_the_time_are_no_offer() -> None:
    assert 0 < spot_goodput(10_000) < spot_goodput(100)
    assert spot_goodput(10**9) == 0.0
    assert "spot" not in {offer.name for offer in offers(Cost(), H100, 10**9)}
    with pytest.raises(BadInput, match=r"spot machines are interrupted all the time; try --set cost\.spot=false"):
        device_hour(Cost(spot=True), H100, 10**9)


def test_offers_nobody_makes_are_left_out_but_a_misspelt_provider_is_not() -> None:
    with pytest.raises(NotFound, match="'lamda' offers no H100 SXM"):
        offers(Cost(provider="lamda"), H100)
    with pytest.raises(BadInput, match=r"no price of .* is known; try --set cost\.usd_per_device_hour"):
        offers(Cost(), catalogue.cluster("wse-2"))
    assert [offer.name for offer in offers(Cost(usd_per_device_hour=3.0), catalogue.cluster("wse-2"))][-1] == "rented"


def test_spot_pays_less_the_larger_the_job() -> None:
    kept = [spot_goodput(machines) for machines in (1, 8, 64, 512)]
    assert kept == sorted(kept, reverse=True) and kept[0] > 0.99
    assert spot_goodput(100, monthly=0.0) == 1.0


def test_a_device_with_its_share_of_the_node() -> None:
    one = owned(Cost(staff_usd_per_year=640_000), H100)
    assert one.power_w == 10_200 / 8 and one.staff_usd_per_year == 10_000
    assert owned(Cost(usd_per_device=25_000), H100).capex_usd == 25_000


# --- what can never happen


@given(prices, st.floats(0, 50), st.floats(0.05, 1))
def test_a_higher_price_never_cheapens(price: float, more: float, use: float) -> None:
    job = {"step_s": 2.0, "batch_tokens": 1 << 20, "steps": 100, "num_devices": 64}
    cheap, dear = (training_cost(**job, usd_per_device_hour=p).run_usd for p in (price, price + more))  # type: ignore[arg-type]
    assert dear >= cheap
    dearer = replace(ONE, capex_usd=ONE.capex_usd + 1000 * more)
    assert dearer.usd_per_hour(use) >= ONE.usd_per_hour(use)
    assert replace(ONE, usd_per_kwh=0.1 + more).usd_per_hour(use) >= ONE.usd_per_hour(use)


@given(st.floats(0.05, 1), st.floats(0.05, 1))
def test_more_use_never_makes_an_owned_hour_dearer(one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert ONE.usd_per_hour(high) <= ONE.usd_per_hour(low) * (1 + 1e-12)


@given(st.floats(0.2, 20), st.floats(0, 20), st.floats(0.1, 1))
def test_a_higher_rent_never_delays_break_even(rent: float, more: float, use: float) -> None:
    months = [ONE.break_even_month(use, price) or float("inf") for price in (rent, rent + more)]
    uses = [ONE.break_even_utilisation(price) or float("inf") for price in (rent, rent + more)]
    assert months[1] <= months[0] and uses[1] <= uses[0]


# --- nonsense


def test_nonsense_is_one_sentence() -> None:
    with pytest.raises(BadInput, match=r"-1.0 \$/h is not a price"):
        training_cost(step_s=1, batch_tokens=1, steps=1, num_devices=1, usd_per_device_hour=-1.0)
    with pytest.raises(BadInput, match="num_devices=0 must be above 0"):
        serving_cost(num_devices=0, usd_per_device_hour=1, tokens_in_per_s=1, tokens_out_per_s=1)
    with pytest.raises(NotFound, match="'lamda' offers no H100 SXM; did you mean lambda"):
        device_hour(Cost(provider="lamda"), H100)
    with pytest.raises(BadInput, match=r"no purchase price of TPU v5e is known; try --set cost\.usd"):
        device_hour(Cost(owned=True), catalogue.cluster("tpu-v5e"))
    with pytest.raises(BadInput, match="utilisation of 0"):
        ONE.usd_per_hour(0)
