"""One vocabulary: every name says its unit, once."""

from __future__ import annotations

import re

import pytest

from armillary.spec.gauges import GAUGES, RENAMED, Gauge, budget_gauge, current_names, former_names, prometheus_name

ENDINGS = {"_bytes": "B", "_usd": "USD", "_fraction": "fraction"}


@pytest.mark.parametrize("gauge", GAUGES.values(), ids=GAUGES.keys())
def test_the_end_of_a_name_is_its_unit(gauge: Gauge) -> None:
    name = gauge.name.removesuffix("_total")
    if re.search(r"_per_s(_per_device)?$", name):
        assert gauge.unit.endswith("/s")
    elif name.endswith("_s"):
        assert gauge.unit == "s"
    for ending, unit in ENDINGS.items():
        assert name.endswith(ending) == (gauge.unit == unit) or gauge.name in ("mfu", "hfu")


@pytest.mark.parametrize("gauge", GAUGES.values(), ids=GAUGES.keys())
def test_counters_are_totals_and_everything_is_described(gauge: Gauge) -> None:
    assert (gauge.kind == "counter") == gauge.name.endswith("_total")
    assert len(gauge.meaning) > 5 and not gauge.meaning.endswith(".") and "\n" not in gauge.meaning
    assert re.fullmatch(r"[a-z][a-z0-9_]*", gauge.name)


def test_prometheus_adds_the_prefix() -> None:
    assert prometheus_name("ttft_s") == "armillary_ttft_s"


def test_a_record_s_own_keys_are_not_gauges() -> None:
    assert not {"time", "step", "request", "source"} & set(GAUGES)


def test_the_three_loops_and_the_terms_of_a_step_are_there() -> None:
    assert {gauge.loop for gauge in GAUGES.values()} == {"inner", "training", "product"}
    terms = {"step_s", "compute_s", "comm_exposed_s", "bubble_s", "overhead_s", "mfu", "tokens_per_s_per_device"}
    latencies = {"ttft_s", "itl_s", "tpot_s", "e2e_s", "queue_s", "ttft_p99_s", "itl_p99_s"}
    assert terms | latencies <= set(GAUGES)
    assert GAUGES["ttft_s"].kind == "histogram" and GAUGES["ttft_p99_s"].kind == "value"


def test_the_step_budget_has_nine_parts() -> None:
    assert sum(gauge.meaning.endswith("(step budget)") for gauge in GAUGES.values()) == 9


def test_renamed_gauges_are_read_by_their_current_name() -> None:
    assert not set(RENAMED) & set(GAUGES) and set(RENAMED.values()) <= set(GAUGES)
    assert current_names({"rehearsed_s": 0.5, "step_s": 1.0}) == {"calibration_step_s": 0.5, "step_s": 1.0}
    assert former_names("roofline_fraction") == ("roof_fraction",) and former_names("step_s") == ()
    assert budget_gauge("inefficiency") in GAUGES and budget_gauge("useful") == "useful_fraction"
