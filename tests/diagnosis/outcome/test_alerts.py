"""Findings as alerting rules that Prometheus reads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from armillary.diagnosis.diagnose import diagnose
from armillary.diagnosis.outcome.alerts import alerts
from armillary.diagnosis.readings.open_reading import open_reading
from armillary.errors import BadInput
from tests.diagnosis.served import requests, served
from tests.diagnosis.trained import NOWHERE, plan_of, reading_of

DATA = Path(__file__).parent.parent / "data"


def test_a_server_of_ours_is_asked_for_percentiles_and_gauges() -> None:
    made = served(requests(60, rate=6.0, tokens_in=600), prefill_tokens=16, objective={"ttft_p99_s": 0.25})
    rules = yaml.safe_load(alerts(diagnose(made, NOWHERE), made))["groups"][0]["rules"]
    assert rules and all(rule["for"] == "10m" and rule["labels"]["loop"] == "product" for rule in rules)
    assert all(rule["expr"].startswith(("armillary_", "histogram_quantile(")) for rule in rules)
    assert all(rule["alert"].isidentifier() and rule["annotations"]["summary"] for rule in rules)


def test_a_training_run_alerts_on_the_figure_and_its_limit() -> None:
    made = reading_of(plan_of("train.expert_capacity=0.8"), expert_drop_fraction=0.3)
    found = yaml.safe_load(alerts(diagnose(made, NOWHERE), made))["groups"][0]["rules"]
    rule = next(one for one in found if one["alert"] == "DroppedTokens")
    assert rule["expr"] == "armillary_expert_drop_fraction > 0.05"
    assert "train.expert_capacity=none" in rule["annotations"]["description"]


def test_another_server_is_asked_by_its_own_names() -> None:
    page = open_reading(str(DATA / "synthetic_vllm_kv_full.prom"), NOWHERE)
    found = yaml.safe_load(alerts(diagnose(page, NOWHERE), page))["groups"][0]["rules"]
    assert found and all("vllm:" in rule["expr"] for rule in found)


def test_the_figures_of_a_finding_wake_somebody_together_only() -> None:
    """Requests wait while the cache has space: either alone is healthy."""
    page = open_reading(str(DATA / "synthetic_vllm_batch_limited.prom"), NOWHERE)
    found = yaml.safe_load(alerts(diagnose(page, NOWHERE), page))["groups"][0]["rules"]
    (rule,) = (one for one in found if one["alert"] == "BatchTooSmall")
    assert rule["expr"] == "vllm:num_requests_waiting > 0 and on (instance) vllm:kv_cache_usage_perc < 0.9"


def test_without_a_limit_there_is_nothing_to_alert_on() -> None:
    healthy = diagnose(reading_of(plan_of()), NOWHERE)
    with pytest.raises(BadInput, match="no finding"):
        alerts(replace(healthy, findings=()), reading_of(plan_of()))
