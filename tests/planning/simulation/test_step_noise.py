"""What steps took over what was expected of them, kept by kind and size."""

from __future__ import annotations

from armillary.planning.simulation.step_cost import ENOUGH, StepNoise, step_noise


def test_a_step_gets_the_luck_of_steps_of_its_kind_and_size() -> None:
    short = [(False, 0.001, 1.0 + 0.1 * i) for i in range(ENOUGH)]
    long = [(True, 0.025, 0.99 + 0.001 * i) for i in range(ENOUGH)]
    found = step_noise(short + long)
    assert max(found.ratios_near(True, 0.024)) < 1.0 and max(found.ratios_near(False, 0.0009)) > 1.6
    assert max(found.ratios_near(True, 0.012)) < 1.0, "half the size, but with prompts"
    assert max(found.ratios_near(True, 0.001)) > 1.6, "a size that only others had"


def test_sizes_that_were_seen_too_seldom_take_their_neighbours() -> None:
    few = [(True, 0.008, 3.0)] + [(True, 0.004, 1.0)] * ENOUGH + [(True, 0.1, 2.0)] * ENOUGH
    assert set(step_noise(few).ratios_near(True, 0.008)) == {3.0, 1.0}
    assert set(step_noise(few[:1]).ratios_near(False, 0.008)) == {3.0}, "better than nothing"


def test_nothing_seen_is_no_luck() -> None:
    assert not StepNoise().ratios_near(True, 1.0)
