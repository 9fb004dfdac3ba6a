"""Draft lengths follow acceptance, costs and load."""

from __future__ import annotations

from itertools import product

import pytest

from armillary.engine.speculative.draft_length import MARGIN, Candidate, LengthController
from armillary.engine.speculative.step_costs import StepCosts

FLAT = {1: 1.0, 8: 1.1, 64: 4.0}  # weights are read once: a few rows cost little


def controller(verify: dict[int, float] = FLAT, propose: dict[int, float] | None = None) -> LengthController:
    return LengthController(StepCosts(verify), StepCosts(propose) if propose else None, 6)


def rate(made: LengthController, decodes: int, acceptances: list[float], lengths: tuple[int, ...]) -> float:
    tokens = decodes + sum(a**j for a, n in zip(acceptances, lengths, strict=True) for j in range(1, n + 1))
    return tokens / made.expected_s(decodes, list(lengths))


@pytest.mark.parametrize("propose", [None, {1: 0.05, 64: 0.4}])
@pytest.mark.parametrize("acceptances", [[0.9, 0.5], [0.3, 0.2], [0.95], [0.8, 0.1, 0.6]])
def test_no_other_lengths_give_two_per_cent_more_tokens_per_second(
    propose: dict[int, float] | None, acceptances: list[float]
) -> None:
    made, decodes = controller(propose=propose), len(acceptances)
    chosen = made.lengths(decodes, [Candidate(a, 6) for a in acceptances], 40)
    best = max(rate(made, decodes, acceptances, lengths) for lengths in product(range(7), repeat=decodes))
    plain = rate(made, decodes, acceptances, (0,) * decodes)
    assert rate(made, decodes, acceptances, tuple(chosen)) >= (0.98 * best if best > 1.1 * MARGIN * plain else plain)


def test_high_load_and_low_acceptance_give_none() -> None:
    made = controller({1: 1.0, 64: 64.0})  # every row costs as much as the first
    assert made.lengths(8, [Candidate(0.95, 6)] * 8, 56) == [0] * 8
    assert not made.pays(8, 0.95)
    assert controller().lengths(1, [Candidate(0.01, 6)], 63) == [0]
    assert controller().lengths(1, [Candidate(0.9, 6)], 63)[0] >= 4
    assert controller().lengths(1, [Candidate(0.9, 6)], 2) == [2], "no more than there is room for"


def test_a_draft_model_that_is_as_slow_as_the_target_drafts_nothing() -> None:
    made = controller(propose={1: 1.0, 64: 1.0})
    assert made.lengths(1, [Candidate(0.9, 6)], 63) == [0]


def test_trials_take_a_hundredth_of_the_time() -> None:
    made = controller(propose={1: 0.5, 64: 0.5})
    tried = 0
    for _ in range(2000):
        lengths = made.trial(1, [Candidate(0.0, 6)], 63)
        tried += any(lengths)
        made.took(1, lengths, made.expected_s(1, lengths))
    assert 0.004 < tried * 0.5 / 2000 < 0.0105


def test_proportions_are_enough_until_the_first_step() -> None:
    costs = StepCosts({1: 1.0, 8: 1.1}, is_relative=True)
    costs.learn(1, 0.01)
    assert costs.seconds(1) == pytest.approx(0.01) and costs.seconds(8) == pytest.approx(0.011)


def test_costs_follow_what_steps_take() -> None:
    costs = StepCosts({1: 1.0, 4: 1.2, 8: 1.6})
    assert costs.seconds(6) == pytest.approx(1.4) and costs.seconds(16) == pytest.approx(2.4)
    for _ in range(100):
        costs.learn(4, 3.0 / costs.seconds(4))
    assert costs.seconds(4) == pytest.approx(3.0, rel=0.01)
    assert costs.seconds(8) >= costs.seconds(4), "more rows never take less"
