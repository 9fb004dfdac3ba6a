"""The verdict: the largest cause that a lever acts on names the loop; a healthy run is told so."""

from __future__ import annotations

from dataclasses import replace

import pytest

from armillary.diagnosis.diagnose import budget_of, diagnose, is_worth, rules_for
from armillary.diagnosis.evidence.finding import Finding, Lever
from armillary.diagnosis.levers.advice import max_workers, workers
from armillary.diagnosis.outcome.diagnosis import Diagnosis
from armillary.diagnosis.readings.reading import Reading
from armillary.errors import BadInput
from armillary.spec import catalogue
from armillary.spec.gauges import GAUGES
from armillary.spec.hardware import Tier
from tests.diagnosis.trained import BUSY, NOWHERE, plan_of, reading_of


def test_there_are_eighteen_rules_and_more() -> None:
    training = rules_for(Reading(source="x", kind="training"))
    serving = rules_for(Reading(source="x", kind="serving", steps=({"engine_step_s": 0.1},)))
    assert len({rule.__name__ for rule in (*training, *serving)}) >= 18
    assert all(rule.__doc__ for rule in (*training, *serving))


def test_a_healthy_run_has_nothing_to_gain() -> None:
    plan = plan_of("layout.micro_batch=8")
    verdict = diagnose(reading_of(plan, window=BUSY | {"roofline": 0.55}), NOWHERE)
    assert verdict.is_healthy and verdict.loop is None and verdict.gain <= 0.05
    assert verdict.headline.startswith("healthy: nothing to gain beyond") and "55%" in verdict.headline


def test_the_largest_cause_names_the_loop() -> None:
    plan = plan_of("train.save_every=2")
    stall = {"checkpoint_stall_s": lambda step: 0.4 if (step + 1) % 2 == 0 else None}
    verdict = diagnose(reading_of(plan, data_wait_s=0.5, **stall), NOWHERE)
    assert (verdict.loop, verdict.cause) == ("inner", "data_starvation")
    assert [finding.cause for finding in verdict.findings[:2]] == ["data_starvation", "checkpoint_stall"]
    assert verdict.levers[0].change == {"data.workers": 3} and verdict.levers[0].speedup == pytest.approx(1.2 / 0.7)


def test_evidence_goes_by_gauge_names_and_levers_by_keys() -> None:
    verdict = diagnose(reading_of(plan_of("layout.precision=fp32"), data_wait_s=0.5, between_steps_s=0.4), NOWHERE)
    assert all(one.gauge in GAUGES for finding in verdict.findings for one in finding.evidence)
    assert all(lever.of in GAUGES and lever.basis and (lever.change or lever.action) for lever in verdict.levers)
    assert len({lever.sets or lever.title for lever in verdict.levers}) == len(verdict.levers), "each once"


def test_the_budget_is_of_the_whole() -> None:
    parts = budget_of(reading_of(data_wait_s=0.2, between_steps_s=0.25))
    assert sum(parts.values()) == pytest.approx(1.0)
    assert parts["data_wait"] == pytest.approx(0.16) and parts["between_steps"] == pytest.approx(0.2)


def test_a_diagnosis_is_the_same_as_json() -> None:
    verdict = diagnose(reading_of(plan_of("layout.recompute=full"), data_wait_s=0.3), NOWHERE)
    assert Diagnosis.from_json(verdict.to_json()) == verdict
    with pytest.raises(BadInput, match="holds no diagnosis; diagnose again"):
        Diagnosis.from_json("{}")
    with pytest.raises(BadInput, match=r"no lever 9; levers are 1 to \d"):
        verdict.lever(9)


def test_a_heavy_cause_is_named_without_a_lever() -> None:
    plan = plan_of("data.workers=16")
    verdict = diagnose(reading_of(plan, data_wait_s=0.7), NOWHERE)
    assert verdict.cause == "data_starvation" and not verdict.findings[0].levers and not verdict.is_healthy
    alone = diagnose(reading_of(bubble_s=0.5), NOWHERE)
    assert alone.cause == "bubble" and alone.loop == "training"


def test_quality_gives_way_to_time_and_is_named_where_nothing_costs_time() -> None:
    experts = {"expert_load_max_over_mean": 6.0, "expert_tail_fraction": 0.7}
    assert diagnose(reading_of(plan_of(), data_wait_s=0.7, **experts), NOWHERE).cause == "data_starvation"
    alone = diagnose(reading_of(plan_of("layout.micro_batch=8"), **experts), NOWHERE)
    assert alone.cause == "expert_imbalance" and alone.levers[0].of == "expert_load_max_over_mean"


def test_too_little_cannot_be_judged() -> None:
    few = diagnose(Reading(source="run x", kind="training", steps=({"step": 1},)), NOWHERE)
    assert not few.judged and not few.is_healthy and few.headline.startswith("cannot be judged: run x has measured")


def test_kernels_that_wait_for_a_core_are_not_called_slow() -> None:
    """Beside another program everything looks as if compiling would help; causes that were measured stay."""
    lever = Lever(title="compile the blocks", change={"train.compile": True}, speedup=2.0)
    slow = Finding(loop="inner", cause="compute", rule="compute", share=0.5, says="", evidence=(), levers=(lever,))
    assert is_worth(slow, reading_of()) and not is_worth(slow, reading_of(host_queue_s=0.4))
    assert is_worth(replace(slow, cause="precision"), reading_of(host_queue_s=0.4))


def test_no_more_loader_workers_are_advised_than_there_are_cores() -> None:
    cores = replace(catalogue.cluster("h100"), chip=replace(catalogue.cluster("h100").chip, kind="cpu"))
    plan = replace(plan_of(), cluster=replace(cores, tiers=(Tier(link=catalogue.links()["nvlink-2"], count=8),)))
    assert max_workers(plan) == 1, "eight ranks on eight cores"
    assert max_workers(replace(plan, layout=replace(plan.layout, dp=2))) == 4
    assert workers(1.0, 0.1, most=4) == 4 and workers(1.0, 0.1) == 13
    assert max_workers(replace(plan_of(), cluster=catalogue.cluster("h100"))) == 14, "112 cores for eight ranks"
    assert max_workers(replace(plan_of(), cluster=replace(catalogue.cluster("h100"), node=None))) == 16, "not known"


def test_a_step_or_two_name_no_cause() -> None:
    """They are warm-up: a run that was stopped at once waited for its first collective, and for nothing else."""
    waits = {"comm_exposed_s": 0.9, "window": {}}
    short, long = (diagnose(reading_of(plan_of("layout.dp=2"), count=count, **waits), NOWHERE) for count in (2, 20))
    assert long.cause == "exposed_communication"
    assert short.cause is None and not short.judged and "too few steps" in short.headline
