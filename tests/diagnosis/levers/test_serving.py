"""Levers of a server are priced by playing its requests again: what is predicted is what is then obtained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from armillary.diagnosis.diagnose import diagnose
from armillary.diagnosis.levers.serving import levers_for
from armillary.diagnosis.readings.reading import Reading
from armillary.diagnosis.rules.serving import RULES
from armillary.planning.simulation.replayed_requests import Arrival
from armillary.planning.simulation.step_cost import StepCost
from armillary.store.home import Home
from tests.diagnosis.served import requests, served

FLAT = StepCost(base_s=0.004, prefill_s=2e-4, decode_s=1.2e-3)
"""a step costs its tokens, so that more rows buy little"""


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home.at(tmp_path)


def long_among_answers() -> list[Arrival]:
    long = [replace(one, number=100 + one.number) for one in requests(12, rate=2.0, tokens_in=1500, tokens_out=4)]
    return sorted([*requests(8, tokens_in=32, tokens_out=200), *long], key=lambda one: one.at_s)


CASES: dict[str, tuple[Sequence[Arrival], dict[str, Any], str]] = {
    "rows": (requests(40), {"max_running": 2}, "serve.max_running"),
    "batching": (requests(60), {"batching": "static", "max_running": 8}, "serve.batching"),
    "cache": (requests(60, shared=512, tokens_in=16, tokens_out=8), {"prefix_cache": False}, "serve.prefix_cache"),
    "first token": (
        requests(40, rate=5.0, shared=512, tokens_in=16, tokens_out=8),
        {"prefix_cache": False},
        "serve.prefix_cache",
    ),
    "blocks": (requests(40, tokens_out=128), {"kv_tokens": 768, "max_model_len": 512}, "serve.kv_bytes"),
    "chunks": (long_among_answers(), {"max_tokens_per_step": 8192}, "serve.prefill_tokens"),
    "budget": (requests(24, tokens_in=500, tokens_out=8), {"max_tokens_per_step": 32}, "serve.max_tokens_per_step"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_predicted_is_obtained(name: str, home: Home) -> None:
    arrivals, given, key = CASES[name]
    before = served(arrivals, **given)
    found = diagnose(before, home)
    lever = found.levers[0]
    assert key in lever.change and lever.speedup > 1.1 and lever.sets.startswith(f"--set {key}=")
    changed = {name.removeprefix("serve."): value for name, value in lever.change.items()}
    if "kv_bytes" in changed:
        changed = {"kv_tokens": round(768 * changed.pop("kv_bytes") / _kv_bytes(before))}
    after = served(arrivals, **{**given, **changed})
    now, then = before.get(lever.of), after.get(lever.of)
    assert now is not None and then is not None
    obtained = then / now if lever.of.endswith("_per_s") else now / then
    assert abs(obtained - lever.speedup) <= max(0.03, 0.3 * (lever.speedup - 1))


def _kv_bytes(reading: Reading) -> float:
    from armillary.diagnosis.evidence.serving_run import ServingRun
    from armillary.diagnosis.levers.serving_replay import Replay

    service = ServingRun(reading, reading.plan)
    assert reading.plan is not None and service.cost is not None
    return Replay(service, reading.plan.model, service.cost).kv_bytes


def test_copies_of_attention_are_replayed_as_one_with_the_rows_of_all() -> None:
    from armillary.diagnosis.evidence.serving_run import ServingRun
    from armillary.diagnosis.levers.serving_replay import Replay

    reading = served(requests(40), max_running=4, max_tokens_per_step=512, prefill_tokens=64)
    assert reading.plan is not None and reading.plan.serve is not None
    one = reading.plan
    halves = replace(one.serve, dp_attention=2, max_running=2, max_tokens_per_step=256, prefill_tokens=32)
    found = []
    for plan in (one, replace(one, serve=halves)):
        service = ServingRun(reading, plan)
        assert service.cost is not None
        found.append(Replay(service, plan.model, service.cost).simulated().gauges)
    assert found[0] == found[1]


def test_as_many_servers_as_make_the_queue_go(home: Home) -> None:
    bears = served(requests(80), cost=FLAT).values["requests_per_s"]
    found = diagnose(served(requests(160, rate=1.7 * bears), cost=FLAT), home)
    assert (found.loop, found.cause) == ("product", "too_few_replicas")
    assert "start 2 servers" in found.levers[0].action and "2 × the devices" in found.levers[0].risk
    assert not found.levers[0].change and found.levers[0].speedup > 1.5


@pytest.mark.parametrize("load", [0.4, 0.8])
def test_a_server_that_keeps_up_has_nothing_to_gain(load: float, home: Home) -> None:
    bears = served(requests(80)).values["requests_per_s"]
    found = diagnose(served(requests(120, rate=load * bears)), home)
    assert found.is_healthy and "nothing to gain beyond" in found.headline


@pytest.mark.parametrize("count", [80, pytest.param(240, marks=pytest.mark.slow)])
def test_a_queue_that_grows_is_priced_by_what_is_answered(count: int, home: Home) -> None:
    """How long requests wait goes with how long was measured; how many are answered a second does not."""
    bears = served(requests(80), max_running=2).values["requests_per_s"]
    found = diagnose(served(requests(count, rate=2 * bears), max_running=2), home)
    assert found.cause == "batch_too_small" and found.levers[0].of == "tokens_out_per_s"
    assert found.levers[0].speedup == pytest.approx(1.9, abs=0.25), "twice as many come"
    assert found.levers[0].change["serve.max_running"] >= 8, "with less the queue stays"


@pytest.mark.slow
def test_an_objective_does_not_change_how_a_queue_that_grows_is_priced(home: Home) -> None:
    bears = served(requests(80), max_running=2).values["requests_per_s"]
    asked = served(requests(80, rate=2 * bears), max_running=2, objective={"e2e_p99_s": 0.1})
    assert diagnose(asked, home).levers[0].of == "tokens_out_per_s"


def test_launches_are_priced_by_what_the_device_needs(home: Home) -> None:
    launch_bound = StepCost(base_s=0.008, prefill_s=1e-6, decode_s=1e-6)
    eager = served(requests(40), chip="h200", graphs=False, cost=launch_bound, max_running=64)
    found = diagnose(eager, home)
    assert found.cause == "launch_overhead" and found.levers[0].change == {"serve.graphs": True}
    assert found.levers[0].speedup > 3


def test_without_a_plan_or_requests_nothing_is_priced(home: Home) -> None:
    reading = served(requests(40), max_running=2)
    (finding, *_) = [found for rule in RULES if (found := rule(reading, reading.plan)) is not None]
    assert levers_for(finding, reading, home)
    assert levers_for(finding, replace(reading, plan=None), home) == ()
    assert levers_for(finding, replace(reading, requests=()), home) == ()


@pytest.mark.parametrize("times", [1.3, 2.0])
def test_a_lever_that_leaves_the_queue_does_not_own_it(times: float, home: Home) -> None:
    """More rows would help a little where a step still has a base to share; the queue would stay."""
    some = StepCost(base_s=0.010, prefill_s=2e-4, decode_s=1.4e-3)
    bears = served(requests(80), cost=some, max_running=16).values["requests_per_s"]
    found = diagnose(served(requests(160, rate=times * bears), cost=some, max_running=16), home)
    assert found.cause == "too_few_replicas" and "batch_too_small" in {one.cause for one in found.findings}


@pytest.mark.parametrize("chats", [8, pytest.param(10, marks=pytest.mark.slow), 16])
def test_chunks_help_whichever_requests_are_the_median(chats: int, home: Home) -> None:
    """Few essays among many chats, or many among few: what is lost is judged over all of them."""
    essays = [replace(one, number=100 + one.number) for one in requests(12, rate=3.0, tokens_in=1500, tokens_out=4)]
    both = sorted([*requests(chats, tokens_in=32, tokens_out=200), *essays], key=lambda one: one.at_s)
    found = diagnose(served(both, max_tokens_per_step=8192), home)
    assert found.cause == "prefill_interference" and "serve.prefill_tokens" in found.levers[0].change


def test_a_lever_that_clears_the_queue_owns_it(home: Home) -> None:
    bears = served(requests(80), max_running=4).values["requests_per_s"]
    found = diagnose(served(requests(160, rate=1.3 * bears), max_running=4), home)
    assert found.cause == "batch_too_small" and found.levers[0].speedup > 1.5
