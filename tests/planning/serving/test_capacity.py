"""Serving capacity: batch and times under load, the highest rate, replicas, choices, split pools."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.errors import BadInput
from armillary.planning.node_ranking import rank_serving
from armillary.planning.serving.capacity import capacity, saturated, sustainable
from armillary.planning.serving.deployment_options import Request, best, deployment_options, from_layout, pools
from armillary.planning.serving.disaggregation import split_pools, transfer_s
from armillary.planning.serving.forward_ops import ServingDtypes, Split
from armillary.planning.serving.generation import static_batch, steady_state
from armillary.planning.serving.queueing import Server, operating_point
from armillary.planning.serving.replica import Replica
from armillary.planning.serving.serving_report import choice_cells, explain, plan_rows
from armillary.planning.simulation.replayed_requests import Arrival
from armillary.planning.simulation.simulated_engine import simulate, system_of
from armillary.planning.simulation.step_cost import planned_step_cost
from armillary.spec import catalogue
from armillary.spec.gauges import GAUGES
from armillary.spec.layout import Layout
from armillary.spec.tables.serve import Serve
from armillary.spec.tables.traffic import Cost, Objective, Traffic

CHAT = Traffic(requests_per_s=20, tokens_in=1000, tokens_out=250)
rates, lengths = st.floats(0.01, 50), st.integers(1, 4000)


def server(
    model: str = "llama-3.1-8b", on: str = "h100", split: Split | None = None, traffic: Traffic = CHAT
) -> Server:
    replica = Replica(config=catalogue.model(model).config, cluster=catalogue.cluster(on), split=split or Split())
    return Server(replica=replica, serve=Serve(), traffic=traffic)


def request(model: str = "llama-3.1-70b", on: str = "h100x64", **changes: object) -> Request:
    values: dict[str, object] = {"traffic": CHAT, "objective": Objective(ttft_p99_s=2, itl_p99_s=0.1), "cost": Cost()}
    return Request(
        config=catalogue.model(model).config, cluster=catalogue.cluster(on), serve=Serve(), **values | changes
    )  # type: ignore[arg-type]


# --- a batch from start to end


def test_a_static_batch_is_its_prefill_and_its_steps() -> None:
    replica = server().replica
    found = static_batch(replica, 8, 1000, 101)
    assert found.total_s == pytest.approx(found.ttft_s + 100 * found.itl_s)
    assert found.tokens_out_per_s == pytest.approx(8 * 101 / found.total_s)
    assert found.itl_s == pytest.approx(replica.decode(8, 1050).total_s, rel=1e-3)


def test_a_full_house_shares_its_time_between_prompts_and_tokens() -> None:
    replica = server().replica
    alone, prompts = steady_state(replica, 64, 1, 500), steady_state(replica, 64, 4000, 500)
    assert prompts.tokens_out_per_s < 0.7 * alone.tokens_out_per_s


# --- one replica under load


def test_little_s_law_and_the_stretched_step() -> None:
    one = server()
    found = operating_point(one, 5.0)
    assert found is not None
    assert found.running == pytest.approx(5.0 * 249 * found.step_s, rel=1e-4)
    assert found.step_s == pytest.approx(one.decode_s(found.running + 1) / (1 - 5.0 * one.prefill_s), rel=1e-4)


def test_requests_at_constant_intervals_share_no_step_with_a_burst() -> None:
    poisson, constant = (server(traffic=replace(CHAT, arrival=kind)) for kind in ("poisson", "constant"))  # type: ignore[arg-type]
    assert poisson.seen(3.0) == 4.0 and constant.seen(3.0) == 3.0 and constant.seen(0.1) == 1.0
    assert poisson.seen(1e9) == poisson.most_running


@pytest.mark.parametrize(("rows", "shape"), [(16, (1024, 64)), (32, (512, 48))])
def test_all_at_once_is_what_the_scheduler_makes_of_a_queue(rows: int, shape: tuple[int, int]) -> None:
    """More than of random arrivals, because bursts need rows too."""
    traffic = Traffic(requests_per_s=1, tokens_in=shape[0], tokens_out=shape[1])
    one = replace(server(on="h200", traffic=traffic), serve=Serve(max_running=rows, prefix_cache=False))
    asked = {"at_s": 0.0, "tokens_in": shape[0], "tokens_out": shape[1], "limit": shape[1]}
    arrivals = [Arrival(number=n + 1, **asked) for n in range(4 * rows)]  # type: ignore[arg-type]
    cost = planned_step_cost(one.replica, context=shape[0] + shape[1] // 2, prompt=shape[0])
    system = system_of(one.replica.config, one.serve, 1e6, "gpu")
    seen = simulate(arrivals, replace(system, streamed=False), cost).gauges["tokens_out_per_s"]
    found = capacity(one)
    assert saturated(one, 4 * rows).tokens_out_per_s == pytest.approx(seen, rel=0.06)
    assert found.saturated.tokens_out_per_s > found.highest.requests_per_s * shape[1]
    assert found.rows_limit


def test_all_at_once_with_a_prefix_that_only_one_stream_shares() -> None:
    """A mean prompt can be shorter than the prefix."""
    mixed = replace(CHAT, shared_prefix=990, long_requests_per_s=80, long_tokens_in=1)
    apart = replace(CHAT, tokens_in=10, long_requests_per_s=80, long_tokens_in=1)
    shared, short = (saturated(server(traffic=each), 64).total_s for each in (mixed, apart))
    assert shared > short > 0.9 * shared


def test_streams_of_one_rate_have_transfers_of_their_own() -> None:
    long_first = replace(CHAT, tokens_in=8192, long_requests_per_s=CHAT.requests_per_s, long_tokens_in=100)
    one = server(on="h100x8", traffic=long_first)
    assert split_pools(one, one).transfer_p99_s == transfer_s(one.replica, 8192)


def test_the_median_transfer_is_that_of_the_larger_stream() -> None:
    mostly_long = replace(CHAT, requests_per_s=0.2, tokens_in=100, long_requests_per_s=0.5, long_tokens_in=8192)
    one = server(on="h100x8", traffic=mostly_long)
    assert split_pools(one, one).transfer_s == transfer_s(one.replica, 8192)


def test_an_idle_replica_answers_in_its_own_time() -> None:
    one = server()
    found = operating_point(one, 1e-9)
    assert found is not None
    assert found.ttft_p99_s < one.alone_s + 3 * one.decode_s(1)
    assert found.itl_p99_s == pytest.approx(one.decode_s(1))


def test_beyond_what_it_bears_there_is_no_load() -> None:
    one = server()
    assert operating_point(one, 1 / one.prefill_s) is None
    assert operating_point(one, 1e6) is None


def test_constant_arrivals_do_not_wait_and_bursts_wait_longer() -> None:
    waits = {}
    for name, traffic in (
        ("constant", replace(CHAT, arrival="constant")),
        ("poisson", CHAT),
        ("bursty", replace(CHAT, arrival="gamma", burstiness=3.0)),
    ):
        found = operating_point(server(traffic=traffic), 12.0)
        assert found is not None
        waits[name] = found.ttft_p99_s
    assert waits["constant"] < waits["poisson"] < waits["bursty"]


def test_a_shared_prefix_is_not_computed_again() -> None:
    plain, shared = server(), server(traffic=replace(CHAT, shared_prefix=900))
    assert shared.prompt == 100 and shared.prefill_s < 0.2 * plain.prefill_s
    off = replace(shared, serve=Serve(prefix_cache=False))
    assert off.prefill_s == pytest.approx(plain.prefill_s)


@settings(max_examples=40, deadline=None)
@given(rates, rates)
def test_more_traffic_never_makes_a_request_faster(rate: float, more: float) -> None:
    one = server()
    low, high = operating_point(one, rate), operating_point(one, rate + more)
    if high is None:
        return
    assert low is not None, "a lower rate is borne where a higher is"
    for gauge in ("running", "step_s", "itl_p99_s", "tpot_p99_s", "ttft_p50_s", "ttft_p99_s", "e2e_p99_s"):
        assert getattr(high, gauge) >= getattr(low, gauge) * (1 - 1e-3), gauge


# --- the highest rate, and replicas


def test_the_highest_rate_meets_the_objective_and_a_little_more_does_not() -> None:
    one, objective = server(), Objective(ttft_p99_s=0.3, itl_p99_s=0.04)
    found = sustainable(one, objective)
    assert found.ttft_p99_s <= 0.3 and found.itl_p99_s <= 0.04
    above = operating_point(one, found.requests_per_s * 1.02)
    assert above is None or above.ttft_p99_s > 0.3 or above.itl_p99_s > 0.04


def test_replicas_are_the_rate_over_the_highest_rounded_up() -> None:
    found = capacity(server(traffic=replace(CHAT, requests_per_s=100)))
    assert found.replicas == -(-100 // found.highest.requests_per_s)
    assert found.actual.requests_per_s == pytest.approx(100 / found.replicas)
    assert found.devices == found.replicas


def test_predictions_are_gauges() -> None:
    found = capacity(server("llama-3.1-70b", "h100x8", Split(tp=8)), Objective(ttft_p99_s=1))
    predicted = found.predicted()
    assert set(predicted) <= set(GAUGES) and all(value >= 0 for value in predicted.values())
    assert predicted["devices"] == 8 * predicted["replicas"]
    assert predicted["memory_peak_bytes"] == pytest.approx(0.9 * 80e9)
    assert predicted["tokens_out_per_s"] == 20 * 250


@settings(max_examples=25, deadline=None)
@given(st.floats(1, 8), lengths, lengths)
def test_a_better_chip_never_needs_more_replicas(factor: float, tokens_in: int, tokens_out: int) -> None:
    traffic = Traffic(requests_per_s=50, tokens_in=tokens_in, tokens_out=tokens_out)
    base = server(traffic=traffic)
    chip = base.replica.cluster.chip
    assert chip.memory_bytes_per_s and chip.memory_bytes
    wanted = capacity(base).replicas
    for better in (
        replace(chip, memory_bytes_per_s=chip.memory_bytes_per_s * factor),
        replace(chip, memory_bytes=chip.memory_bytes * factor),
        replace(chip, flops={name: peak * factor for name, peak in chip.flops.items()}),
    ):
        cluster = replace(base.replica.cluster, chip=better)
        assert capacity(replace(base, replica=replace(base.replica, cluster=cluster))).replicas <= wanted


# --- choices


def test_the_best_choice_is_the_cheapest_that_meets_the_objectives() -> None:
    asked = request()
    ranked, found = deployment_options(asked), best(asked)
    good = [one for one in ranked if one.capacity]
    assert found == ranked[0] and good == ranked[: len(good)]
    dollars = [one.cost.million_tokens_usd for one in good if one.cost]
    assert dollars == sorted(dollars) and len(good) >= 5
    assert all(one.reason for one in ranked[len(good) :])
    assert found.predicted()["ttft_p99_s"] <= 2 and found.predicted()["itl_p99_s"] <= 0.1


def test_quantisation_and_tp_are_choices() -> None:
    tried = deployment_options(request())
    assert {one.dtypes.weights for one in tried} == {"bf16", "fp8", "int8", "int4"}, "an H100 does not compute in fp4"
    assert {one.split.tp for one in tried} == {1, 2, 4, 8}
    assert {one.split.ep for one in deployment_options(request("mixtral-8x7b"))} == {1, 2, 4, 8}


def test_a_recipe_s_layout_is_taken_as_it_is() -> None:
    found = from_layout(request(), Layout(tp=4, precision="fp8"))
    assert found.split == Split(tp=4) and found.dtypes == ServingDtypes(weights="fp8", compute="fp8", kv="fp8")


def test_smaller_chunks_of_prompt_where_gaps_are_limited() -> None:
    unlimited = Serve(prefill_slowdown=1e6)
    tight = replace(request(objective=Objective(itl_p99_s=0.05)), serve=unlimited)
    found = from_layout(tight, Layout(tp=4, precision="fp8")).capacity
    assert found is not None and found.server.serve.max_tokens_per_step < 2048
    large = sustainable(replace(found.server, serve=unlimited), tight.objective)
    assert found.highest.requests_per_s > 3 * large.requests_per_s


def test_dearer_devices_never_make_tokens_cheaper() -> None:
    cheap, dear = (from_layout(request(cost=Cost(usd_per_device_hour=price)), Layout(tp=4)) for price in (2.0, 3.0))
    assert cheap.cost and dear.cost
    assert dear.cost.million_tokens_usd == pytest.approx(1.5 * cheap.cost.million_tokens_usd)


# --- split pools


def test_split_pools_keep_prompts_out_of_the_gaps() -> None:
    asked = request()
    together, apart = best(asked), pools(asked, best(asked))
    values = apart.predicted()
    assert values["itl_p99_s"] < together.predicted()["itl_p99_s"]
    assert values["ttft_p99_s"] <= 2 and set(values) <= set(GAUGES)
    assert apart.devices == values["devices"] == apart.prefill.devices + apart.decode.devices


def test_moving_a_cache_takes_its_bytes_over_the_link() -> None:
    replica = server("llama-3.1-70b", "h100x16", Split(tp=8)).replica
    assert transfer_s(replica, 16_000) == pytest.approx(16_000 * 40_960 / (50e9 * replica.rates.link))


def test_an_objective_that_a_moved_cache_uses_up() -> None:
    one = server("llama-2-7b", "l4x8", traffic=replace(CHAT, tokens_in=3000))
    with pytest.raises(BadInput, match="leaves no time for a prompt"):
        split_pools(one, one, Objective(ttft_p99_s=0.05))


# --- for people


def test_rows_say_what_is_asked_and_terms_carry_their_numbers() -> None:
    asked = request()
    found = best(asked)
    rows = dict(plan_rows(asked, found, pools(asked, found)))
    assert {"replica", "memory / device", "KV cache", "needed", "TTFT", "ITL", "cost", "disaggregated"} <= set(rows)
    assert "limited by" in rows["per replica"]
    terms = {term.name: term for term in explain(asked, found)}
    assert terms["replicas"].numbers.startswith("⌈20 / ") and terms["per million tokens"].value.startswith("$")
    assert len(choice_cells(found)) == 8


# --- nonsense


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"objective": Objective(itl_p99_s=1e-4)}, r"itl_p99_s=100 µs cannot be met: .* needs .* for a single request"),
        ({"objective": Objective(ttft_p99_s=1e-4)}, r"ttft_p99_s=100 µs cannot be met"),
        ({"traffic": replace(CHAT, tokens_in=10_000_000)}, r"holds no request of 10,000,250 tokens"),
    ],
)
def test_what_cannot_be_met_is_one_sentence(change: dict[str, object], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        from_layout(request(**change), Layout(tp=8))


def test_a_model_bigger_than_the_cluster() -> None:
    with pytest.raises(BadInput, match=r"deepseek-v3 with tp=1 needs .* try --set layout\.tp="):
        best(request("deepseek-v3", "h100"), weights=("bf16",))


@pytest.mark.slow  # by default tests/cli/plan/test_serving.py ranks the catalogue
def test_nodes_are_ranked_by_what_a_token_costs() -> None:
    ranked = rank_serving(request("llama-3.1-8b", "h100"))
    good = [one for one in ranked if one.best]
    dollars = [one.best.cost.million_tokens_usd for one in good if one.best and one.best.cost]
    assert len(good) > 20 and dollars == sorted(dollars) and ranked[: len(good)] == good
    assert all(one.reason for one in ranked[len(good) :]) and any("vllm" in one.software for one in good)
