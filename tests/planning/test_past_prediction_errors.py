"""How far earlier plans were off, as a plan says it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from armillary.planning.past_prediction_errors import confidence
from armillary.spec import catalogue
from armillary.store.home import Home
from tests.diagnosis.trained import plan_of, run_of


def test_runs_of_such_a_chip_count(tmp_path: Path) -> None:
    home, plan = Home.at(tmp_path), plan_of()
    assert confidence(home, plan.cluster.chip) is None
    half = replace(plan, predicted={**plan.predicted, "step_s": 0.5})
    run_of(home, half, name="first")
    run_of(home, replace(plan, predicted={**plan.predicted, "step_s": 0.9}), name="second")
    found = confidence(home, plan.cluster.chip)
    assert found is not None and sorted(found.errors) == pytest.approx([-0.5, -0.1])
    assert str(found) == "± 30 % in the step on this kind of device (track record: 2 runs)"
    assert confidence(home, catalogue.chip("a100-80gb-sxm")) is None, "another chip says nothing"


def test_runs_of_servers_do_not_hide_those_that_trained(tmp_path: Path) -> None:
    home, plan = Home.at(tmp_path), plan_of()
    run_of(home, plan, name="trained")
    for number in range(25):
        run_of(home, replace(plan, train=None), name=f"served-{number}", count=1)
    found = confidence(home, plan.cluster.chip)
    assert found is not None and len(found.errors) == 1


def test_a_broken_run_is_passed_over(tmp_path: Path) -> None:
    home, plan = Home.at(tmp_path), plan_of()
    run_of(home, plan, name="begun").plan.write_text("{")
    assert confidence(home, plan.cluster.chip) is None
