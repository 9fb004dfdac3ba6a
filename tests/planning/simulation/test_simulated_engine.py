"""The simulator decides what the engine decides, and knows what steps cost from their records."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.engine.build import make_engine
from armillary.engine.engine import Engine
from armillary.engine.request.request import Request
from armillary.engine.request.sampling_params import SamplingParams
from armillary.engine.scheduler.decision import StepWork
from armillary.engine.scheduler.settings import Settings
from armillary.model.transformer import build
from armillary.planning.serving.replica import Replica
from armillary.planning.simulation.fitted_step_time import fit_step_cost, least_queries
from armillary.planning.simulation.replayed_requests import Arrival, Prompts, drawn, recorded
from armillary.planning.simulation.request_stats import served_gauges
from armillary.planning.simulation.simulated_engine import Simulated, System, simulate
from armillary.planning.simulation.step_cost import StepCost, extrapolate_batch, planned_step_cost
from armillary.spec import catalogue
from armillary.spec.layout import Layout
from armillary.spec.plan import Plan
from armillary.spec.tables.serve import Serve
from armillary.spec.tables.traffic import Traffic
from tests.model.layers.test_attention_forms import small

COST = StepCost(base_s=0.005, prefill_s=2e-5, decode_s=1e-4, context_s=1e-8)
COSTS = (0.0, 1e-3), (1e-2, 0.0)
"""seconds of a step, and of each token"""
DECIDED = (
    "prefill_tokens",
    "decode_tokens",
    "context_tokens",
    "prefill_pairs",
    "running",
    "waiting",
    "kv_used_fraction",
    "preemptions_total",
    "prefix_hits_total",
    "prefix_evicted_total",
    "tokens_out_total",
)
"""what a decision shows in its record"""


def asked() -> list[Request]:
    """Prompts that share beginnings, and answers that may stop early."""
    dice, made = Random(5), []
    texts = [[dice.randrange(1, 60) for _ in range(40)] for _ in range(3)]
    for i in range(14):
        prompt = texts[i % 3][: dice.randint(10, 40)] + [dice.randrange(1, 60) for _ in range(dice.randint(2, 20))]
        params = SamplingParams(max_tokens=dice.randint(4, 30), seed=i, temperature=1.0)
        made.append(Request(id=str(i), prompt=prompt, params=params))
    return made


def engine_run(serve: Serve) -> tuple[Engine, list[dict[str, Any]], list[dict[str, Any]]]:
    """A real model answers; its engine, its step records, its request records."""
    steps: list[dict[str, Any]] = []
    requests: list[dict[str, Any]] = []

    def record(gauges: dict[str, Any], *, step: int | None = None, request: str | None = None) -> None:
        if "calibration_step_s" not in gauges:
            (steps if request is None else requests).append(gauges)

    model = build(small(vocab=64, context=256), dtype=torch.float32, device="cpu", seed=1)
    engine, _ = make_engine(model, None, serve, record=record, seed=0, eos_ids=(7,))
    engine.generate(asked())
    return engine, steps, requests


@pytest.mark.parametrize(
    "serve",
    [
        Serve(max_running=4, kv_bytes=10**6),
        Serve(max_running=8, kv_bytes=10**6, prefix_cache=False, overlap=False),
        Serve(max_running=6, max_tokens_per_step=24, kv_bytes=10**6),
        Serve(max_running=8, kv_bytes=60_000),
        Serve(max_running=8, kv_bytes=10**6, batching="static"),
    ],
)
def test_the_same_requests_are_decided_alike(serve: Serve) -> None:
    engine, steps, requests = engine_run(serve)
    cache = engine.scheduler.cache
    system = System(
        settings=engine.scheduler.settings,
        num_blocks=cache.num_blocks,
        block_tokens=cache.block_tokens,
        groups=cache.groups,
        prefix=serve.prefix_cache,
        overlap=engine.loop.overlap,
    )
    again = simulate([replace(one, at_s=0.0) for one in recorded(requests)], system, COST)
    assert _decided(again.steps) == _decided(steps)
    assert any(one["waiting"] for one in steps)
    for name in ("tokens_out", "cached_tokens"):
        measured = {one["request_number"]: one[name] for one in requests}
        assert {one["request_number"]: one[name] for one in again.requests} == measured


def _decided(steps: Any) -> list[list[float]]:
    return [[one[name] for name in DECIDED] for one in steps]


def test_time_passes_as_steps_cost() -> None:
    system = System(settings=Settings(max_model_len=512, vocab=100, max_running=4), num_blocks=200)
    one = [Arrival(number=1, at_s=1.0, tokens_in=32, tokens_out=5, limit=5)]
    cost = StepCost(base_s=0.01, prefill_s=0.001, decode_s=0.002)
    for overlap, late in ((False, 0.0), (True, 0.012)):  # with overlap a host that is busy all along takes tokens later
        found = simulate(one, replace(system, overlap=overlap), cost)
        assert found.gauges["ttft_p50_s"] == pytest.approx(0.01 + 32 * 0.001 + late)
        assert found.gauges["tpot_p50_s"] == pytest.approx(0.012, rel=0.3)
    waits = simulate(one, system, replace(cost, waits=True))
    assert waits.gauges["ttft_p50_s"] == pytest.approx(0.042) and waits.gauges["tpot_p50_s"] == pytest.approx(0.012)


def test_replicas_share_the_requests_out() -> None:
    system = System(settings=Settings(max_model_len=512, vocab=100, max_running=4), num_blocks=400)
    many = drawn(Traffic(requests_per_s=50.0, tokens_in=64, tokens_out=32, duration_s=4.0))
    one, two = simulate(many, system, COST), simulate(many, system, COST, replicas=2)
    assert one.gauges["requests_total"] == two.gauges["requests_total"] == len(many) == 200
    assert two.gauges["queue_p50_s"] < one.gauges["queue_p50_s"] / 1.5
    assert two.gauges["tokens_out_total"] == one.gauges["tokens_out_total"]


def test_what_cannot_be_served_is_counted() -> None:
    system = System(settings=Settings(max_model_len=64, vocab=100), num_blocks=100)
    found = simulate([Arrival(number=1, at_s=0.0, tokens_in=100, tokens_out=5, limit=5)], system, COST)
    assert found == Simulated(gauges={}, steps=[], requests=[], refused=1)


def test_prompts_share_what_they_shared() -> None:
    """Also where the one that is repeated repeats another, and goes on into an answer, and was not recorded."""
    first = Arrival(number=1, at_s=0, tokens_in=20, tokens_out=12, limit=12)
    second = Arrival(number=2, at_s=1, tokens_in=40, tokens_out=4, limit=4, shared_prefix=32, prefix_source=1)
    third = Arrival(number=3, at_s=2, tokens_in=40, tokens_out=4, limit=4, shared_prefix=36, prefix_source=2)
    stranger = Arrival(number=9, at_s=2, tokens_in=20, tokens_out=4, limit=4, shared_prefix=16, prefix_source=5)
    prompts = Prompts([first, second, third, stranger])
    assert prompts.of(second) == [1] * 32 + [2] * 8
    assert prompts.of(third) == [1] * 32 + [2] * 4 + [3] * 4
    assert prompts.of(stranger) == [5] * 16 + [9] * 4


def test_an_engine_that_was_started_again_counts_anew() -> None:
    def one(number: int, at: float) -> dict[str, Any]:
        return {"request_number": number, "arrived_s": at, "tokens_in": 4, "tokens_out": 2, "e2e_s": 1.0}

    found = recorded([one(1, 10.0), one(2, 11.0), one(1, 20.0), one(2, 21.5)])
    assert [(made.number, made.at_s) for made in found] == [(1, 0.0), (2, 1.5)]


@settings(max_examples=10, deadline=None)
@given(base=st.floats(1e-3, 2e-2), prefill=st.floats(2e-5, 5e-4), extra=st.floats(0, 2e-3), seed=st.integers(0, 99))
def test_the_cost_of_steps_is_found_among_noise(base: float, prefill: float, extra: float, seed: int) -> None:
    planted, dice = StepCost(base_s=base, prefill_s=prefill, decode_s=prefill + extra), Random(seed)
    steps = []
    for _ in range(300):
        one = {"prefill_tokens": dice.choice([0, 0, 16, 64, 300]), "decode_tokens": dice.randint(0, 16)}
        one["context_tokens"], one["prefill_pairs"] = 50 * one["decode_tokens"], 20 * one["prefill_tokens"]
        stalls = 8.0 if dice.random() < 0.02 else 1.0
        steps.append(one | {"engine_step_s": planted.of(one) * dice.uniform(0.9, 1.1) * stalls})
    found = fit_step_cost(steps)
    assert found is not None and found.error < 0.3
    for prefill_tokens, decodes in ((0, 1), (0, 16), (300, 8), (500, 0), (0, 32)):
        step = {
            "prefill_tokens": prefill_tokens,
            "decode_tokens": decodes,
            "context_tokens": 50 * decodes,
            "prefill_pairs": 20 * prefill_tokens,
        }
        assert found.of(step) == pytest.approx(planted.of(step), rel=0.35)


@pytest.mark.parametrize("seed", range(4))
def test_steps_that_are_all_alike_still_tell_tokens_from_rows(seed: int) -> None:
    """A processor whose steps nearly all hold 240 tokens of prompts and 8 decodes; what others would cost is asked."""
    planted = StepCost(base_s=5.5e-3, prefill_s=2.4e-5, decode_s=2.2e-4, context_s=1e-7, pair_s=3e-8, row_s=7e-4)
    dice, steps = Random(seed), []
    for number in range(175):
        rows = dice.choice((1, 3, 4)) if number < 160 else 0
        tokens, decodes = (256 - 4 * dice.randrange(8) * (rows > 1), 8) if rows else (0, 1 + (number - 160) // 2)
        one = {
            "prefill_tokens": tokens,
            "prefill_rows": rows,
            "decode_tokens": decodes,
            "context_tokens": 424 * decodes,
            "prefill_pairs": 200 * tokens,
        }
        steps.append(one | {"engine_step_s": planted.of(one) * dice.lognormvariate(0.0, 0.03)})
    found = fit_step_cost(steps)
    assert found is not None and found.error < 0.05
    full, prompts = {"decode_tokens": 16, "context_tokens": 6720}, {"prefill_tokens": 2000, "prefill_rows": 7}
    assert found.of(full) == pytest.approx(planted.of(full), rel=0.15)
    assert found.of(prompts) == pytest.approx(planted.of(prompts), rel=0.15)


@pytest.mark.parametrize("seed", range(3))
def test_what_a_run_never_shows_is_as_it_was_rehearsed(seed: int) -> None:
    """Whole prompts only; a few tokens behind many, and chunks, are asked. The rehearsal was quicker than the run."""
    planted = StepCost(
        base_s=4e-3, prefill_s=2.5e-5, decode_s=4e-4, context_s=3e-7, pair_s=3e-8, row_s=6e-4, past_s=5e-7
    )
    dice, steps = Random(seed), []
    for _ in range(200):
        rows, decodes = dice.choice((0, 1)), dice.randint(1, 8)
        one = _whole(416 * rows, rows) | {"decode_tokens": decodes, "context_tokens": 430 * decodes}
        steps.append(one | {"engine_step_s": 1.3 * planted.of(one) * dice.lognormvariate(0.0, 0.05)})
    tried = [
        _whole(size * rows, rows, past * rows) for rows in (1, 8) for size in (16, 64, 256) for past in (0, 512, 1024)
    ]
    tried += [{"prefill_tokens": 0, "decode_tokens": rows, "context_tokens": 512 * rows} for rows in (1, 8)]
    tried = [one | {"calibration_step_s": planted.of(one) * dice.lognormvariate(0.0, 0.03)} for one in tried]
    found = fit_step_cost(steps, calibration=tried)
    assert found is not None and found.of(steps[0]) == pytest.approx(1.3 * planted.of(steps[0]), rel=0.1)
    for asked in (_whole(128, 8, 3200), _whole(256, 1, 800) | {"decode_tokens": 8, "context_tokens": 3440}):
        assert found.of(asked) == pytest.approx(1.3 * planted.of(asked), rel=0.15)


def _whole(tokens: int, rows: int, past: int = 0) -> dict[str, float]:
    each, before = tokens / max(rows, 1), past / max(rows, 1)
    return {
        "prefill_tokens": tokens,
        "prefill_rows": rows,
        "prefill_past": past,
        "decode_tokens": 0,
        "prefill_pairs": tokens * (before + each / 2),
    }


def test_more_rows_than_ran_cost_what_the_planner_says_at_the_pace_of_those_that_did() -> None:
    dear = StepCost(base_s=7e-4, decode_s=6e-5, context_s=9e-8)
    planned = StepCost(base_s=3e-4, decode_s=1e-6, context_s=1e-8)
    found = extrapolate_batch(dear, planned, 4, 100.0)
    assert found.decode_seconds(4, 100.0) == pytest.approx(dear.decode_seconds(4, 100.0))
    pace = dear.decode_seconds(4, 100.0) / planned.decode_seconds(4, 100.0)
    assert found.decode_seconds(64, 100.0) == pytest.approx(pace * planned.decode_seconds(64, 100.0))
    cheap = StepCost(base_s=7e-4, decode_s=1e-7)
    assert extrapolate_batch(cheap, planned, 4, 100.0) is cheap


def test_few_queries_take_a_gpu_as_long_as_a_tile_for_each_of_its_processors() -> None:
    cost = StepCost(base_s=0.0, pair_s=1e-9, least_queries=512.0)
    assert cost.seconds(StepWork(64, prefill_pairs=64 * 1000)) == pytest.approx(512 * 1000 * 1e-9)
    assert cost.seconds(StepWork(1024, prefill_pairs=1024 * 1000)) == pytest.approx(1024 * 1000 * 1e-9)
    assert cost.seconds(StepWork(decode_tokens=4)) == 0.0
    made = {
        chip: Plan(
            created="",
            recipe={},
            model=catalogue.model("qwen3-0.6b").config,
            layout=Layout(),
            cluster=catalogue.cluster(chip),
        )
        for chip in ("h200", "cpu")
    }
    assert least_queries(made["h200"]) == 132 * 64 / 16 and least_queries(made["cpu"]) == least_queries(None) == 0.0


def test_few_steps_are_not_enough_and_the_planner_stands_in() -> None:
    steps = [{"engine_step_s": 0.01, "decode_tokens": 4, "prefill_tokens": 0, "context_tokens": 400}] * 5
    assert fit_step_cost(steps) is None
    replica = Replica(config=catalogue.model("qwen3-0.6b").config, cluster=catalogue.cluster("h200"))
    planned, scaled = planned_step_cost(replica), planned_step_cost(replica, steps=steps)
    assert planned.decode_seconds(32, 512) == pytest.approx(replica.decode(32, 512).total_s, rel=0.25)
    assert scaled.of(steps[0]) == pytest.approx(0.01) and "planner" in scaled.basis


@pytest.mark.parametrize("rows", [0, 16, 64])
@pytest.mark.parametrize(("chunk", "past"), [(128, 0), (256, 7000), (512, 0), (2048, 6144), (8192, 0)])
def test_the_planner_s_line_is_near_its_roofline_for_any_chunk(rows: int, chunk: int, past: int) -> None:
    replica = Replica(config=catalogue.model("llama-3.1-8b").config, cluster=catalogue.cluster("h200"))
    pairs = chunk * (past + (chunk + 1) / 2)
    work = StepWork(
        prefill_tokens=chunk,
        decode_tokens=rows,
        context_tokens=1000 * rows,
        prefill_pairs=pairs,
        prefill_rows=1,
        prefill_past=past,
    )
    assert planned_step_cost(replica, context=1000).seconds(work) == pytest.approx(replica.seconds(work), rel=0.07)


def test_percentiles_of_gaps_count_tokens_not_steps() -> None:
    steps = [{"engine_step_s": 0.01, "decode_tokens": 1}] * 50 + [{"engine_step_s": 0.03, "decode_tokens": 9}] * 50
    assert served_gauges(steps, [])["itl_p50_s"] == 0.03
    requests = [{"arrived_s": float(i), "e2e_s": 1.0, "tokens_out": 10, "tokens_in": 3} for i in range(10)]
    assert served_gauges([], requests)["tokens_out_per_s"] == pytest.approx(10.0)


def test_blocks_in_host_memory_are_found_again_for_the_time_of_their_copies() -> None:
    """Four conversations of 160 tokens take turns in a cache for two of them."""
    arrivals = [
        Arrival(
            number=number,
            at_s=10.0 * number,
            tokens_in=160,
            tokens_out=2,
            limit=2,
            shared_prefix=144 if number > 4 else 0,
            prefix_source=number - 4 if number > 4 else 0,
        )
        for number in range(1, 13)
    ]
    settings = Settings(max_model_len=512, vocab=100, max_running=4)
    small = System(settings=settings, num_blocks=22)
    large = replace(small, host_blocks=100)
    cost = StepCost(base_s=0.0, prefill_s=0.01, host_block_s=0.001)
    alone, offloaded = (simulate(arrivals, system, cost) for system in (small, large))
    assert not alone.gauges["prefix_hits_total"] and "kv_loaded_total" not in alone.gauges
    assert offloaded.gauges["prefix_hits_total"] == 8 * 144
    assert offloaded.gauges["kv_loaded_total"] >= 8 * 8
    assert alone.requests[-1]["ttft_s"] == pytest.approx(1.6, rel=0.05)
    assert 0.16 + 0.008 < offloaded.requests[-1]["ttft_s"] < 0.25  # a block computed, nine copied each way


def throughput(num_stages: int, cost: StepCost, running: int) -> float:
    """Tokens/s of requests that all wait at the start."""
    arrivals = [Arrival(number=i, at_s=0.0, tokens_in=64, tokens_out=64, limit=64) for i in range(4 * running)]
    limits = Settings(max_model_len=256, vocab=100, max_running=running, num_stages=num_stages)
    return simulate(arrivals, System(settings=limits, num_blocks=4096, prefix=False), cost).gauges["tokens_out_per_s"]


def test_stages_work_on_different_steps() -> None:
    """Two stages of half a step each are nearly twice as fast as one step in flight where rows cost, and no slower
    where only weights do."""
    by_rows, by_weights = (StepCost(base_s=base, decode_s=row, prefill_s=row, waits=True) for base, row in COSTS)
    for cost, least, most in ((by_rows, 1.65, 2.0), (by_weights, 0.99, 1.05)):
        half = replace(cost, base_s=cost.base_s / 2, decode_s=cost.decode_s / 2, prefill_s=cost.prefill_s / 2)
        assert least < throughput(2, half, 16) / throughput(1, cost, 16) < most


def test_stages_are_not_idle_for_a_lack_of_requests_alone() -> None:
    """A single request is as fast as with one step in flight."""
    cost, half = StepCost(base_s=0.01, waits=True), StepCost(base_s=0.005, waits=True)
    assert throughput(2, half, 1) == pytest.approx(throughput(1, cost, 1), rel=0.01)


def test_prompts_in_other_steps_keep_the_pace_of_streams() -> None:
    """Two streams on two stages beside long prompts: the longest gap over the gap alone."""
    cost = StepCost(base_s=5e-3, prefill_s=2e-5, waits=True)
    streams = [Arrival(number=i, at_s=0.0, tokens_in=16, tokens_out=300, limit=300) for i in (1, 2)]
    prompts = [Arrival(number=i, at_s=0.5, tokens_in=4000, tokens_out=1, limit=1) for i in (3, 4)]
    limits = Settings(max_model_len=8192, vocab=100, max_running=8, num_stages=2)

    def longest(streamed: bool) -> float:
        system = System(settings=limits, num_blocks=4096, prefix=False, streamed=streamed)
        return max(request.get("itl_max_s", 0.0) for request in simulate(streams + prompts, system, cost).requests)

    assert longest(False) > 4 * 0.01 and longest(True) < 2.3 * 0.01
