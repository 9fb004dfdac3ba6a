"""Drafts that cost more than they bring, by the engine's own account."""

from __future__ import annotations

from dataclasses import replace

import pytest

from armillary.diagnosis.readings.reading import Reading
from armillary.diagnosis.rules.speculation import rejected_drafts
from tests.diagnosis.served import requests, served


def speculated(speedup: float, *, drafted: float = 1000.0, accepted: float = 100.0) -> Reading:
    made = served(requests(30, rate=4.0))
    gauges = {"speculation_speedup": speedup, "drafted_total": drafted, "accepted_total": accepted}
    return replace(made, steps=tuple(dict(step) | gauges for step in made.steps))


def test_drafts_that_are_mostly_rejected() -> None:
    made = speculated(0.8)
    found = rejected_drafts(made, made.plan)
    assert found is not None and found.share == pytest.approx(0.2) and "10% of 1,000 draft tokens" in found.says
    assert found.levers[0].change == {"serve.speculate": "none"} and found.levers[0].speedup == pytest.approx(1.25)


def test_drafts_that_pay_are_no_cause_and_a_few_prove_nothing() -> None:
    for made in (speculated(1.3), speculated(0.98), speculated(0.5, drafted=50.0), served(requests(30, rate=4.0))):
        assert rejected_drafts(made, made.plan) is None
