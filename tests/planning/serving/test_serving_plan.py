"""A serving plan from a recipe: the chosen way, the record, the notes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from armillary.errors import BadInput
from armillary.planning.serving.serving_plan import ServingPlan, serving_plan
from armillary.spec.gauges import GAUGES
from armillary.spec.plan import Plan
from armillary.spec.recipe import recipe_from_dict
from armillary.store.home import Home
from armillary.store.nan_safe_json import dumps

CHAT = {"requests_per_s": 20.0, "tokens_in": 1000, "tokens_out": 250}


def made(
    tmp_path: Path, model: str = "llama-3.1-70b", on: str = "h100x64", search: bool = False, **tables: Any
) -> ServingPlan:
    recipe = recipe_from_dict({"model": {"name": model}, "hardware": {"on": on}, "traffic": CHAT, **tables})
    return serving_plan(recipe, recipe.model_config(), recipe.cluster(), Home.at(tmp_path), search=search)


def test_the_record_reads_back_and_holds_gauges_only(tmp_path: Path) -> None:
    found = made(tmp_path, objective={"ttft_p99_s": 2.0, "itl_p99_s": 0.1})
    plan = found.plan()
    again = Plan.from_json(plan.to_json())
    assert again.layout == plan.layout and again.predicted == plan.predicted and again.train is None
    assert set(plan.predicted) <= set(GAUGES) and again.serve is not None
    assert plan.layout.num_devices == plan.predicted["devices"] == found.chosen.devices


def test_json_names_every_way_and_what_the_refused_lack(tmp_path: Path) -> None:
    plain = made(tmp_path, objective={"itl_p99_s": 0.1}).plain()
    assert dumps(plain) and plain["for"] == "serve" and plain["pools"]["devices"] > 0
    refused = [one for one in plain["choices"] if one["reason"]]
    assert refused and all("devices" not in one for one in refused)
    assert plain["choices"][0]["million_tokens_usd"] == plain["predicted"]["million_tokens_usd"]


def test_a_recipe_with_a_layout_is_served_by_it(tmp_path: Path) -> None:
    found = made(tmp_path, layout={"tp": 8, "precision": "fp8"})
    assert found.chosen.split.tp == 8 and len(found.tried) == 1
    assert found.layout().precision == "fp8"
    assert len(made(tmp_path, layout={"tp": 8, "precision": "fp8"}, search=True).tried) > 10, "unless all are asked for"


def test_notes_say_what_was_changed_or_is_missing(tmp_path: Path) -> None:
    layout = {"tp": 8, "precision": "fp8"}
    few = made(tmp_path, on="h100x8", objective={"itl_p99_s": 0.04}, layout=layout, serve={"prefill_slowdown": 1e6})
    text = " ".join(few.notes())
    assert "devices are needed and 8 are available" in text
    assert "step budget lowered to" in text and "--set serve.max_tokens_per_step=" in text


def test_the_scheduler_takes_every_step_budget_that_is_advised(tmp_path: Path) -> None:
    layout, itl = {"precision": "bf16"}, {"itl_p99_s": 0.008}
    found = made(tmp_path, "llama-3.1-8b", "h200", objective=itl, layout=layout)
    serve, text = found.capacity.server.serve, " ".join(found.notes())
    assert serve.max_running == serve.max_tokens_per_step < 256 and found.plan().serve == serve
    assert f"--set serve.max_tokens_per_step={serve.max_tokens_per_step} --set serve.max_running=" in text
    with pytest.raises(BadInput, match=r"a step of 128 tokens cannot decode 256 sequences; set serve\.max_running=128"):
        made(tmp_path, serve={"max_tokens_per_step": 128})


def test_a_tighter_limit_of_steps_where_gaps_are_limited(tmp_path: Path) -> None:
    few = made(tmp_path, "llama-3.1-8b", "h200x2", objective={"itl_p99_s": 0.007}, layout={"precision": "bf16"})
    default = made(
        tmp_path,
        "llama-3.1-8b",
        "h200x2",
        objective={"itl_p99_s": 0.007},
        layout={"precision": "bf16"},
        serve={"prefill_slowdown": 2.0},
    )
    assert any("--set serve.prefill_slowdown=" in note for note in few.notes())
    assert few.chosen.devices < default.chosen.devices


def test_copies_of_attention_are_ranks_with_requests_of_their_own(tmp_path: Path) -> None:
    by_serve = made(tmp_path, "deepseek-v2-lite", "h200x4", serve={"dp_attention": 4})
    by_layout = made(tmp_path, "deepseek-v2-lite", "h200x4", layout={"ep": 4})
    assert by_serve.chosen.split == by_layout.chosen.split and by_serve.chosen.split.ep == 4
    times = [each.capacity.server.replica.decode(64, 1024) for each in (by_serve, by_layout)]
    assert times[0].comm_s > times[1].comm_s, "every token goes to every rank, and the sum of the results, too"
    assert times[0].gemm_s == times[1].gemm_s
    with pytest.raises(BadInput, match="has no experts, which"):
        made(tmp_path, serve={"dp_attention": 2})


def test_requests_longer_than_the_model_can_hold(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"requests of 200,250 tokens exceed the 131,072 of llama-3\.1-70b"):
        made(tmp_path, traffic={**CHAT, "tokens_in": 200_000})


def test_nothing_that_meets_the_objectives(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="itl_p99_s=10 µs cannot be met"):
        made(tmp_path, objective={"itl_p99_s": 1e-5})
