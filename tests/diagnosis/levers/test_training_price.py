"""Levers priced: parts that were measured, changed as the planner predicts."""

from __future__ import annotations

import pytest

from armillary.diagnosis.diagnose import diagnose
from armillary.diagnosis.evidence.finding import Finding
from armillary.diagnosis.levers.training import levers_for
from armillary.diagnosis.levers.training_price import Pricing
from tests.diagnosis.trained import BUSY, NOWHERE, plan_of, reading_of


def priced(*sets: str, **made: object) -> Pricing:
    return Pricing(reading_of(plan_of(*sets), **made), NOWHERE)


def test_no_change_buys_nothing() -> None:
    found = priced().price({"layout.micro_batch": 2})
    assert found is not None and found.speedup == pytest.approx(1.0) and found.memory_bytes == 0.0


def test_launches_follow_their_number_and_work_its_predicted_time() -> None:
    tiny = BUSY | {"useful": 0.05, "inefficiency": 0.05, "launch_gap": 0.6, "launch_bound": 0.3}
    half = priced(window=tiny).price({"layout.micro_batch": 4})
    assert half is not None and 1.7 < half.speedup < 2.0, "nine tenths of the time are launches, now half as many"
    busy = priced().price({"layout.micro_batch": 4})
    assert busy is not None and 1.0 < busy.speedup < 1.15


def test_joining_rows_saves_what_the_trainer_saw_come_with_each() -> None:
    sets = (
        "hardware.on=cpu",
        "model.name=armillary-2m",
        "layout.dp=1",
        "train.sequence=64",
        "layout.micro_batch=1",
        "train.batch_tokens=512",
        "layout.recompute=full",
    )
    calls: dict[str, float] = {"kernels": 10_000.0, "host_cpu_s": 1.0, "recompute_s": 0.2}
    for fraction in (0.0, 0.4, 0.8):
        made = priced(*sets, **calls, micro_batch_overhead_fraction=fraction, optimizer_s=0.1)
        for rows in (2, 8):
            found = made.price({"layout.micro_batch": rows})
            share = 0.9 * fraction  # the optimiser steps once, however many there are
            assert found is not None and found.speedup == pytest.approx(1 / (share / rows + 1 - share))
    (lever,) = [one for one in levers_for(_busy(), made.reading, NOWHERE) if "layout.micro_batch" in one.change]
    assert lever.change == {"layout.micro_batch": 8}


def test_what_was_measured_to_be_made_again_is_what_goes() -> None:
    whole = priced("layout.recompute=full", recompute_s=0.2)
    none, some = whole.price({"layout.recompute": "none"}), whole.price({"layout.recompute": "selective"})
    assert none is not None and none.speedup == pytest.approx(1.25), "a fifth of the step, which is what was seen"
    assert some is not None and 1.0 < some.speedup < none.speedup


def test_a_narrower_format_quickens_what_it_multiplies() -> None:
    busy = BUSY | {"useful": 0.5, "inefficiency": 0.4, "launch_gap": 0.1}
    most = priced("layout.precision=fp32", window=busy | {"fusible": 0.0}).price({"layout.precision": "bf16"})
    some = priced("layout.precision=fp32", window=busy | {"fusible": 0.6}).price({"layout.precision": "bf16"})
    assert most is not None and some is not None and 1.2 < some.speedup < most.speedup


def test_compiling_joins_passes_and_calls_and_leaves_products() -> None:
    sets = (
        "hardware.on=cpu",
        "model.name=armillary-2m",
        "layout.dp=1",
        "train.sequence=128",
        "train.batch_tokens=2048",
    )
    made = [priced(*sets, window=BUSY | {"fusible": share}, kernels=1584.0, host_cpu_s=0.2) for share in (0.0, 0.3)]
    calls, both = (one.fused({"train.compile": True}) for one in made)
    assert calls is not None and both is not None and all(one.may_compile for one in made)
    assert 1.02 < calls.speedup < 1 / (1 - made[0].fixed), "calls are fewer, not none"  # type: ignore[operator]
    assert 1.05 < both.speedup / calls.speedup < 1 / (1 - 0.3), "three tenths shrink, and do not go"
    (lever, *_) = [one for one in levers_for(_busy(), made[1].reading, NOWHERE) if "train.compile" in one.change]
    assert lever.speedup == pytest.approx(both.speedup)


def _busy() -> Finding:
    return Finding(loop="inner", cause="compute", rule="compute", share=0.0, evidence=(), says="kernels work")


def test_waiting_for_data_stays_unless_the_step_gets_longer() -> None:
    starved = priced("layout.recompute=full", data_wait_s=0.5).price({"layout.recompute": "none"})
    assert starved is not None and starved.speedup == pytest.approx(1.0), "the loader is what holds it up"


def test_a_change_that_does_not_fit_or_divide_has_no_price() -> None:
    assert priced().price({"layout.micro_batch": 3}) is None
    assert (
        priced("model.name=llama-2-7b", "layout.zero=3", "layout.recompute=full").price(
            {"layout.zero": 0, "layout.recompute": "none"}
        )
        is None
    )


def test_exchanges_are_carried_over_in_their_predicted_proportion() -> None:
    whole = priced("layout.tp=8", "layout.dp=1", comm_exposed_s=0.5)
    found = whole.price({"layout.tp": 1, "layout.dp": 8})
    assert found is not None and found.speedup > 1.3


def test_without_a_plan_for_training_there_is_nothing_to_price() -> None:
    verdict = diagnose(reading_of(data_wait_s=0.5), NOWHERE)
    assert verdict.cause == "data_starvation" and verdict.levers[0].action.startswith("DataLoader")


def test_workers_are_as_many_as_the_step_needs() -> None:
    from armillary.diagnosis.rules.device import data_starvation

    made = reading_of(plan_of(), data_wait_s=0.75)
    finding = data_starvation(made, made.plan)
    assert finding is not None
    (lever,) = levers_for(finding, made, NOWHERE)
    assert lever.change == {"data.workers": 5} and lever.speedup == pytest.approx(4.0)
    more = reading_of(plan_of("data.workers=2"), data_wait_s=0.75)
    (lever,) = levers_for(finding, more, NOWHERE)
    assert lever.change == {"data.workers": 10} and lever.title == "loader workers 2 → 10"
