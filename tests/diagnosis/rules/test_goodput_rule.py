"""The rule on failures: a run that repeats much, and one that was only stopped."""

from __future__ import annotations

from dataclasses import replace

import pytest

from armillary.diagnosis.diagnose import diagnose
from armillary.diagnosis.rules.goodput import failures
from armillary.store.goodput import GoodputAccount, account_of
from armillary.store.run_events import RunEvent
from tests.diagnosis.trained import NOWHERE, plan_of, reading_of


def account(*, every: int, fails: int, restart_s: float = 5.0) -> GoodputAccount:
    """Steps of 1 s; each of `fails` failures comes after 100 steps, and a checkpoint of 1 s every `every` steps."""
    now, saved = 0.0, 0
    events = [RunEvent(time=0.0, event="created")]
    for _ in range(max(1, fails)):
        events.append(RunEvent(time=now, event="steps", more={"step": saved}))
        begin = saved
        for step in range(begin + 1, begin + 101):
            now += 1.0
            if step % every == 0:
                events.append(RunEvent(time=now, event="saving", more={"step": step}))
                now, saved = now + 1.0, step
            events.append(RunEvent(time=now, event="steps", more={"step": step}))
        if fails:
            events.append(RunEvent(time=now, event="restarting"))
            now += restart_s
    return account_of([*events, RunEvent(time=now, event="steps", more={"step": saved})])


def test_a_run_that_repeats_its_steps_saves_more_often() -> None:
    lost = account(every=70, fails=6)
    made = replace(reading_of(plan_of()), goodput=lost)
    found = failures(made, made.plan)
    assert found is not None and "6 times" in found.says
    ran_s = lost.total_s
    assert found.share == pytest.approx((lost.seconds["repeated"] + lost.restart_s) / ran_s) and found.share > 0.2
    verdict = diagnose(made, NOWHERE)
    lever = next(each for item in verdict.findings if item.cause == "failures" for each in item.levers)
    assert lever.change["train.save_every"] < 70 and lever.speedup > 1.05 and lever.of == "goodput_fraction"


def test_a_run_without_failures_or_with_few_has_no_finding() -> None:
    assert failures(reading_of(), None) is None
    assert failures(replace(reading_of(), goodput=account(every=10, fails=0)), None) is None
    assert failures(replace(reading_of(), goodput=account(every=10, fails=1, restart_s=1.0)), None) is None
