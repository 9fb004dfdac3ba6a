"""Engine steps measured and planned: a run's steps by their work, a page by its mean step; what they correct."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from armillary.engine.scheduler.decision import StepWork
from armillary.errors import BadInput
from armillary.planning.calibrate.engine_times import MeanStep, own_engine_time, page_time, parts_of_mean_step
from armillary.planning.calibrate.run_times import Described
from armillary.planning.device_model.correction import Correction, save_correction
from armillary.planning.serving.forward_ops import Split
from armillary.planning.serving.replica import PARTS, EngineStepTime, Replica
from armillary.planning.serving.serving_plan import serving_plan, serving_request
from armillary.spec import catalogue
from armillary.spec.recipe import recipe_from_dict
from armillary.store.home import Home
from tests.diagnosis.served import requests, served

FACTORS = Correction(chip="h100-sxm", work="serving", compute=1.5, communication=2.0, overhead=0.5, runs=("a",))


def replica(**more: object) -> Replica:
    given = {"config": catalogue.model("llama-3.1-8b").config, "cluster": catalogue.cluster("h100x2")}
    return Replica(**{**given, "split": Split(tp=2), **more})  # type: ignore[arg-type]


def test_every_term_belongs_to_a_part_and_is_corrected_with_it() -> None:
    assert set(PARTS) == {field.name for field in fields(EngineStepTime)}
    plain, fixed = replica().decode(8, 500), replica(correction=FACTORS).decode(8, 500)
    parts = plain.parts()
    assert sum(parts.values()) == pytest.approx(plain.total_s) and all(seconds > 0 for seconds in parts.values())
    assert fixed.total_s == pytest.approx(sum(FACTORS.factors[part] * seconds for part, seconds in parts.items()))


def test_the_mean_step_of_a_page_is_its_decodes_and_their_share_of_prompts() -> None:
    mean = MeanStep(running=16, tokens_in=1000, computed=1000, tokens_out=100, gap_s=0.02)
    one, cached = replica(), replace(mean, computed=0)
    alone = parts_of_mean_step(one, cached, 2048)
    assert sum(alone.values()) == pytest.approx(one.decode(16, 1049).total_s)
    with_prompts = sum(parts_of_mean_step(one, mean, 2048).values())
    mixed = one.seconds(StepWork(decode_tokens=16, context_tokens=16 * 1050, prefill_tokens=1000, prefill_rows=1))
    added = mixed - one.seconds(StepWork(decode_tokens=16, context_tokens=16 * 1050))
    assert with_prompts == pytest.approx(sum(alone.values()) + 0.16 * added)  # every hundredth step of each


def test_a_run_is_held_against_todays_plan_of_its_own_steps(home: Home) -> None:
    reading = served(requests(30, rate=5.0), chip="h100")
    plan = reading.plan
    assert plan is not None and plan.serve is not None
    once = own_engine_time("once", reading.steps, plan, home)
    twice = [{**step, "engine_step_s": 2 * step["engine_step_s"]} for step in reading.steps]
    again = own_engine_time("twice", twice, plan, home)
    assert again.measured_s == pytest.approx(2 * once.measured_s) and again.planned == once.planned
    save_correction(home, FACTORS)
    assert own_engine_time("once", reading.steps, plan, home).planned == once.planned  # never corrected twice
    short = replace(plan, serve=replace(plan.serve, max_model_len=128))  # less than the usual traffic asks for
    assert own_engine_time("short", reading.steps, short, home).measured_s == once.measured_s
    parallel = replace(plan, serve=replace(plan.serve, dp_attention=2))
    with pytest.raises(BadInput, match="data-parallel attention, which is not priced"):
        own_engine_time("parallel", reading.steps, parallel, home)
    with pytest.raises(BadInput, match="no engine step"):
        own_engine_time("idle", [{"engine_step_s": 1.0}], plan, home)


def test_serving_plans_are_corrected_and_training_plans_are_not_by_engine_steps(home: Home) -> None:
    recipe = recipe_from_dict({"model": {"name": "llama-3.1-8b"}, "layout": {"tp": 1, "precision": "bf16"}})
    cluster, config = catalogue.cluster("h100"), catalogue.model("llama-3.1-8b").config
    before = serving_plan(recipe, config, cluster, home)
    save_correction(home, replace(FACTORS, work="training"))
    same = serving_plan(recipe, config, cluster, home)
    assert same.plan().predicted == before.plan().predicted and "corrected" not in " ".join(same.notes())
    save_correction(home, FACTORS)
    after = serving_plan(recipe, config, cluster, home)
    assert after.plan().predicted["itl_p50_s"] > 1.2 * before.plan().predicted["itl_p50_s"]
    assert "corrected by 1 runs" in " ".join(after.notes())
    assert serving_request(recipe, config, cluster, home, is_corrected=False).correction is None


def test_a_page_is_planned_with_the_rates_of_its_server(home: Home) -> None:
    recipe = recipe_from_dict({"model": {"name": "llama-3.1-8b"}, "layout": {"precision": "bf16"}})
    described = Described(
        recipe=recipe, model=catalogue.model("llama-3.1-8b").config, cluster=catalogue.cluster("h100")
    )
    mean = MeanStep(running=1, tokens_in=100, computed=100, tokens_out=100, gap_s=0.01)
    vllm, ours = (page_time("page", mean, by, described, home) for by in ("vllm", "armillary"))
    assert vllm.measured_s == 0.01
    assert sum(vllm.planned.values()) > sum(ours.planned.values())  # our engine runs fewer kernels for one row
