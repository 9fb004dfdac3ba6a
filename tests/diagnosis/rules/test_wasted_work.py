"""Work that leads to nothing: each rule with figures that fire it and figures that do not."""

from __future__ import annotations

import pytest

from armillary.diagnosis.diagnose import diagnose
from armillary.diagnosis.rules.wasted_work import dropped_tokens, fragmentation, skipped_steps
from tests.diagnosis.trained import NOWHERE, plan_of, reading_of


def test_half_precision_that_overflows_every_fourth_step() -> None:
    made = reading_of(plan_of("layout.precision=fp16"), count=40, skipped_steps_total=lambda step: step // 4)
    found = skipped_steps(made, made.plan)
    assert found is not None and found.share == pytest.approx(0.25) and "9 of 36 steps" in found.says  # without warm-up
    assert found.levers[0].change == {"layout.precision": "bf16"}
    assert found.levers[0].speedup == pytest.approx(4 / 3)
    verdict = diagnose(made, NOWHERE)
    assert (verdict.loop, verdict.cause) == ("training", "skipped_steps")


def test_a_loss_scale_that_finds_its_value_is_no_cause() -> None:
    made = reading_of(count=200, skipped_steps_total=lambda step: min(step, 3))
    assert skipped_steps(made, made.plan) is None and skipped_steps(reading_of(), None) is None


def test_skips_in_bf16_have_another_cause_than_the_range() -> None:
    made = reading_of(plan_of(), count=40, skipped_steps_total=lambda step: step // 2)
    found = skipped_steps(made, made.plan)
    assert found is not None and not found.levers[0].change and "train.lr" in found.levers[0].action


def test_tokens_that_find_their_expert_full() -> None:
    made = reading_of(plan_of("train.expert_capacity=0.8"), expert_drop_fraction=0.3)
    found = dropped_tokens(made, made.plan)
    assert found is not None and found.levers[0].sets == "--set train.expert_capacity=none" and "30%" in found.says
    assert diagnose(made, NOWHERE).cause == "dropped_tokens"
    early = reading_of(expert_drop_fraction=lambda step: 0.3 if step < 5 else 0.01)
    assert dropped_tokens(early, early.plan) is None, "a router begins uneven by chance"


def test_memory_in_pieces() -> None:
    made = reading_of(plan_of(), memory_reserved_bytes=78e9, memory_peak_bytes=55e9)
    found = fragmentation(made, made.plan)
    assert found is not None and "expandable_segments" in found.levers[0].action
    assert diagnose(made, NOWHERE).cause == "fragmentation"
    usual = reading_of(plan_of(), memory_reserved_bytes=78e9, memory_peak_bytes=72e9)
    room = reading_of(plan_of(), memory_reserved_bytes=60e9, memory_peak_bytes=40e9)
    assert fragmentation(usual, usual.plan) is None and fragmentation(room, room.plan) is None
