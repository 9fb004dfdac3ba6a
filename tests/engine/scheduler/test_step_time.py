"""What a step is expected to take, by steps that were seen: always at least what it takes, and not by far more."""

from __future__ import annotations

import pytest

from armillary.engine.scheduler.step_time import StepTimes
from armillary.engine.telemetry.step_calibration import StepShape, decision_of
from tests.engine.fake import make_scheduler
from tests.engine.test_engine import ask, make_engine

CACHE = make_scheduler(num_blocks=400).cache


def test_nothing_is_expected_before_anything_was_seen() -> None:
    assert StepTimes().most_seconds(decision_of(StepShape(prompts=1, size=16), CACHE).work) is None


@pytest.mark.parametrize("fixed_s, token_s", [(1.0, 0.0), (0.0, 0.25), (0.5, 0.01), (30.0, 4.0)])
def test_an_upper_estimate_from_one_token_alone(fixed_s: float, token_s: float) -> None:
    """A machine that takes a fixed time for the weights and more for every token, and has shown only one decode."""
    times, seconds = StepTimes(), lambda tokens: fixed_s + token_s * tokens
    times.took(decision_of(StepShape(decodes=1, context=8), CACHE), seconds(1))
    for size in (1, 2, 3, 16, 100):
        expected = times.most_seconds(decision_of(StepShape(prompts=1, size=size), CACHE).work)
        assert expected is not None and seconds(size) <= expected <= 2 * size * seconds(1)


def test_what_larger_steps_took_bounds_smaller_ones() -> None:
    times = StepTimes()
    times.took(decision_of(StepShape(decodes=1, context=8), CACHE), 1.0)
    times.took(decision_of(StepShape(prompts=1, size=128), CACHE), 3.0)
    assert times.most_seconds(decision_of(StepShape(prompts=1, size=60), CACHE).work) == 3.0
    assert times.most_seconds(decision_of(StepShape(prompts=1, size=256), CACHE).work) == 3.0 * 256 / 64


def test_attention_counts_as_the_tokens_that_cost_as_much() -> None:
    times = StepTimes(attention_tokens=10.0)
    short, long = (decision_of(StepShape(prompts=1, size=16, past=past), CACHE) for past in (0, 800))
    times.took(short, 1.0)
    assert (times.most_seconds(long.work) or 0.0) > 20 * (times.most_seconds(short.work) or 0.0)


def test_short_steps_are_measured_when_somebody_asks_and_a_slow_one_is_forgotten() -> None:
    times, step = StepTimes(), decision_of(StepShape(decodes=1, context=8), CACHE)
    times.took(step, 0.01)
    times.took(step, 0.05)
    assert times.most_seconds(step.work) == pytest.approx(0.02)
    times.took(step, 60.0)  # something held it up
    for _ in range(100):
        times.wanted = True
        times.took(step, 0.01)
    assert times.most_seconds(step.work) == pytest.approx(0.02)


def test_an_engine_says_what_is_under_way_and_how_long_that_may_take() -> None:
    engine = make_engine(overlap=True)
    assert engine.under_way() == (0, 0.0)
    engine.scheduler.submit(ask("a", [2, 3, 4], 5, ignore_eos=True), engine.loop.clock())
    engine.step()
    assert engine.under_way() == (3, None)
    engine.step()
    tokens, expected = engine.under_way()
    assert tokens == 1 and expected is not None and expected > 0
