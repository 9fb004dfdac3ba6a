"""Chat beside a stream of 8k-token prompts: with two pools no prompt lengthens a gap, and plan and simulation agree."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from armillary.planning.serving.forward_ops import Group
from armillary.planning.serving.serving_plan import ServingPlan, serving_plan
from armillary.planning.simulation.against_colocated import AgainstColocated, against_colocated
from armillary.planning.simulation.fleet_case import FleetCase, fleet_case
from armillary.planning.simulation.fleet_outcome import FleetOutcome
from armillary.spec.recipe import load_recipe
from armillary.store.home import Home

RECIPES = Path(__file__).parents[3] / "recipes"
SHORT = ("traffic.duration_s=15", "load.warmup_s=0")
CHAT_ALONE = (
    "traffic.long_requests_per_s=0",
    "traffic.tokens_in=200",
    "traffic.tokens_out=400",
    "traffic.requests_per_s=40",
    "traffic.duration_s=6",
    "objective.itl_p99_s=0.012",
)
"""traffic that one device can serve"""


def case_of(tmp_path: Path, name: str, *overrides: str) -> FleetCase:
    recipe = load_recipe(RECIPES / f"long_prompts_{name}.toml", [*SHORT, *overrides])
    return fleet_case(recipe, recipe.model_config(), recipe.cluster(), Home.at(tmp_path))


def compared(case: FleetCase) -> AgainstColocated:
    return against_colocated(FleetOutcome(case, case.run()))


def planned(tmp_path: Path, name: str, *overrides: str) -> ServingPlan:
    recipe = load_recipe(RECIPES / f"long_prompts_{name}.toml", overrides)
    return serving_plan(recipe, recipe.model_config(), recipe.cluster(), Home.at(tmp_path))


def longest_decode_s(plan: ServingPlan, rows: int) -> float:
    """A step that decodes so many requests at their greatest length, and no prompt."""
    replica, traffic = plan.capacity.server.replica, plan.recipe.traffic
    longest = max(each.tokens_in + each.tokens_out for each in traffic.streams)
    return replica.step([Group(count=rows, queries=1, keys=longest)]).total_s


@pytest.mark.parametrize("name", ["8b_2xh200", pytest.param("70b_8xh200", marks=pytest.mark.slow)])
def test_gaps_have_decodes_alone_with_pools_and_prompts_without(tmp_path: Path, name: str) -> None:
    found, plan = compared(case_of(tmp_path, name)), planned(tmp_path, name)
    most = max(look.in_flight for look in found.disaggregated.run.timeline)
    assert found.disaggregated.gauges["itl_p99_s"] < longest_decode_s(plan, most)
    default = replace(found.colocated.case, system=found.disaggregated.case.system)
    gauges = FleetOutcome(default, default.run()).gauges
    assert gauges["itl_p99_s"] > 1.5 * found.disaggregated.gauges["itl_p99_s"], "prompts lengthen the gaps"
    assert gauges["itl_p99_s"] < 2.3 * gauges["itl_p50_s"], "as far as serve.prefill_slowdown lets them"
    assert found.goodputs[0] > 1.1 * found.goodputs[1] and found.verdict.startswith("pays off: goodput ")
    assert found.disaggregated.long_ttfts[50] > 2 * found.disaggregated.gauges["ttft_p50_s"]


def test_a_slow_link_delays_first_tokens_and_no_other(tmp_path: Path) -> None:
    case = case_of(tmp_path, "8b_2xh200")
    usual, slow = FleetOutcome(case, case.run()), replace(case, transfer_s=lambda tokens: 1e-4 * tokens)
    late = FleetOutcome(slow, slow.run())
    assert late.long_ttfts[50] > usual.long_ttfts[50] + 0.6
    assert late.gauges["itl_p99_s"] == pytest.approx(usual.gauges["itl_p99_s"], rel=0.1)


@pytest.mark.parametrize(("overrides", "head"), [((), "pays off"), (CHAT_ALONE, "does not pay off")])
def test_the_plan_advises_what_the_simulation_shows(tmp_path: Path, overrides: tuple[str, ...], head: str) -> None:
    plan, found = planned(tmp_path, "8b_2xh200", *overrides), compared(case_of(tmp_path, "8b_2xh200", *overrides))
    assert plan.pools is not None
    assert plan.pools.verdict(plan.capacity).startswith(f"{head}: ") and found.verdict.startswith(f"{head}: ")
    for gauge in ("itl_p50_s", "itl_p99_s"):
        assert found.disaggregated.gauges[gauge] == pytest.approx(plan.pools.predicted()[gauge], rel=0.2)


def test_replicas_that_do_both_have_the_limit_on_prompts_that_serves_them_best(tmp_path: Path) -> None:
    case = case_of(tmp_path, "8b_2xh200", "objective.itl_p99_s=0.008")
    found = compared(case).colocated
    slowdown = found.case.system.settings.prefill_slowdown
    assert slowdown is not None and found.gauges["goodput_requests_per_s"] > 1.1 * _default_goodput(found.case)


def _default_goodput(case: FleetCase) -> float:
    """With the engine's default limit."""
    settings = replace(case.system.settings, prefill_slowdown=None)
    default = replace(case, system=replace(case.system, settings=settings))
    return FleetOutcome(default, default.run()).gauges["goodput_requests_per_s"]


@pytest.mark.parametrize(
    ("goodputs", "itls", "head"),
    [
        ((5.04, 5.0), (0.008, 0.008), "does not pay off: goodput 5.04 requests/s, "),
        ((5.0, 5.04), (0.006, 0.008), "pays off: goodput 5 requests/s, "),
        ((6.0, 5.0), (0.008, 0.008), "pays off: goodput 6 requests/s instead of 5, "),
        ((4.0, 5.0), (0.006, 0.008), "does not pay off: goodput 4 requests/s instead of 5, "),
    ],
)
def test_goodputs_that_differ_by_less_than_a_percent_are_one(
    goodputs: tuple[float, float], itls: tuple[float, float], head: str
) -> None:
    outcomes: list[Any] = [
        SimpleNamespace(gauges={"goodput_requests_per_s": goodput, "itl_p99_s": itl_s})
        for goodput, itl_s in zip(goodputs, itls, strict=True)
    ]
    assert AgainstColocated(*outcomes).verdict.startswith(head)


def test_completions_of_one_token_have_no_gaps_to_compare(tmp_path: Path) -> None:
    one_token = ("traffic.tokens_out=1", "traffic.long_tokens_out=1", "traffic.duration_s=3")
    found = compared(case_of(tmp_path, "8b_2xh200", *one_token))
    assert ("ITL p99", "–", "–") in found.rows()
    assert "TTFT p99" in found.verdict and "ITL" not in found.verdict


def test_the_plan_for_70b_has_the_recipe_s_pools(tmp_path: Path) -> None:
    plan, fleet = planned(tmp_path, "70b_8xh200"), case_of(tmp_path, "70b_8xh200").fleet
    assert plan.pools is not None and plan.pools.devices == plan.request.cluster.num_devices
    assert (plan.pools.prefill.replicas, plan.pools.decode.replicas) == (fleet.prefill_replicas, fleet.replicas)
