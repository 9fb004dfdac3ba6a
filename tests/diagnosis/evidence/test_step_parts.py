"""The parts of a step: means that a hiccup does not rule, and what is done every so many steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from armillary.diagnosis.evidence.step_parts import parts_of, winsorised_mean
from armillary.diagnosis.readings.reading import Reading
from tests.diagnosis.trained import plan_of, reading_of


def test_a_loader_that_is_late_every_fourth_time_counts() -> None:
    assert winsorised_mean([0.0, 0.0, 0.0, 4.0] * 5) == pytest.approx(1.0)


def test_one_hiccup_hardly_counts() -> None:
    assert winsorised_mean([1.0] * 19 + [100.0]) == pytest.approx(1.0)
    assert winsorised_mean([]) == 0.0


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=50))
def test_steady_is_between_the_least_and_the_mean(values: list[float]) -> None:
    assert min(values) - 1e-6 <= winsorised_mean(values) <= sum(values) / len(values) + 1e-6


def test_what_comes_between_steps_is_spread_over_them() -> None:
    plan = plan_of("train.save_every=5", "train.eval_every=4")
    made = reading_of(
        plan,
        checkpoint_stall_s=lambda step: 2.0 if (step + 1) % 5 == 0 else None,
        validation_s=lambda step: 1.0 if (step + 1) % 4 == 0 else None,
        between_steps_s=0.1,
    )
    parts = parts_of(made)
    assert parts is not None and parts.checkpoint == pytest.approx(0.4) and parts.validation == pytest.approx(0.25)
    assert parts.total == pytest.approx(1.75) and parts.share(0.35) == pytest.approx(0.2)


def test_the_checkpoint_at_the_end_is_every_run_s() -> None:
    plan = plan_of("train.save_every=0")
    parts = parts_of(reading_of(plan, checkpoint_stall_s=lambda step: 9.0 if step == 19 else None))
    assert parts is not None and parts.checkpoint == 0.0 and parts.total == 1.0


def test_nothing_timed_has_no_parts() -> None:
    assert parts_of(Reading(source="x", kind="training")) is None
    alone = parts_of(Reading(source="x", kind="training", values={"step_s": 2.0, "data_wait_s": 0.5}))
    assert alone is not None and alone.work == 1.5
