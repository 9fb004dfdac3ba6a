"""Checkpoint intervals from a run's own account: the rates are read back, and the prediction meets a simulation."""

from __future__ import annotations

import random

import pytest

from armillary.planning.cost.failures import DEVICE_MTBF_H, HOUR, best_interval_s
from armillary.planning.cost.measured_failures import measured_failures
from armillary.store.goodput import GoodputAccount, account_of
from armillary.store.run_events import RunEvent


def simulated(*, mtbf_s: float, save_s: float, restart_s: float, every: int, steps: int, seed: int) -> GoodputAccount:
    """Events of a run with steps of 1 s whose process is killed at exponential times."""
    draw = random.Random(seed)
    now, step, saved = 0.0, 0, 0
    events = [RunEvent(time=0.0, event="created"), RunEvent(time=0.0, event="steps", more={"step": 0})]
    dies = draw.expovariate(1 / mtbf_s)

    def add(event: str, **more: float) -> None:
        events.append(RunEvent(time=now, event=event, more=more))  # type: ignore[arg-type]

    while step < steps:
        saves = (step + 1) % every == 0
        if now + 1.0 + save_s * saves < dies:
            step, now = step + 1, now + 1.0
            if saves:
                add("saving", step=step)
                now, saved = now + save_s, step
            add("steps", step=step)
            continue
        now = dies
        add("restarting")
        while (dies := now + draw.expovariate(1 / mtbf_s)) < now + restart_s:
            now = dies
            add("restarting")
        now, step = now + restart_s, saved
        add("steps", step=step)
    add("finished", step=step)
    return account_of(events)


@pytest.mark.parametrize("seed", range(3))
def test_the_predicted_goodput_meets_a_simulated_run(seed: int) -> None:
    account = simulated(mtbf_s=300, save_s=4, restart_s=20, every=60, steps=20_000, seed=seed)
    found = measured_failures(account)
    assert found is not None and found.is_rate_measured
    assert found.best.failures.mtbf_s == pytest.approx(300, rel=0.35)  # of about 100 failures
    assert found.best.failures.checkpoint_s == pytest.approx(4, rel=0.02)
    assert found.as_run.interval_s == pytest.approx(60, rel=0.2)
    assert found.as_run.goodput_fraction == pytest.approx(found.measured_fraction, rel=0.1)
    assert found.best.interval_s == pytest.approx(best_interval_s(found.best.failures))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("restart_s", [25.0, 60.0])
def test_restarts_that_take_as_long_as_the_time_between_failures(restart_s: float, seed: int) -> None:
    """As on a small machine, where imports take longer than the steps between two failures."""
    account = simulated(mtbf_s=60, save_s=0.1, restart_s=restart_s, every=5, steps=5_000, seed=seed)
    found = measured_failures(account)
    assert found is not None and account.share("restarting") > 0.3
    assert found.as_run.failures.restart_s == pytest.approx(restart_s, rel=0.2)
    assert found.as_run.goodput_fraction == pytest.approx(found.measured_fraction, rel=0.1)


def test_a_run_without_failures_takes_the_published_rate() -> None:
    steady = simulated(mtbf_s=1e12, save_s=1, restart_s=0, every=10, steps=100, seed=0)
    found = measured_failures(steady, num_devices=8)
    assert found is not None and not found.is_rate_measured and "as published" in found.text()
    assert found.best.failures.mtbf_s == DEVICE_MTBF_H * HOUR / 8


def test_a_run_that_never_saved_suggests_nothing() -> None:
    assert measured_failures(account_of([RunEvent(time=0.0, event="created")], now=5.0)) is None
