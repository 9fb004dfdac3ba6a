"""Step times of a replica: against hand-made rooflines and published latencies, and what can never happen."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.errors import BadInput, BadLayout
from armillary.planning.serving.engines import own_rates, physics
from armillary.planning.serving.forward_ops import Forward, Group, ServingDtypes, Split, check_split, sharded
from armillary.planning.serving.replica import Replica
from armillary.spec import catalogue
from armillary.spec.arithmetic.params import parameters
from armillary.spec.arithmetic.workload import forward_ops, make_batch
from armillary.spec.hardware import Cluster
from armillary.store.peaks import Peaks

LLAMA = catalogue.model("llama-3.1-8b").config
MIXTRAL = catalogue.model("mixtral-8x7b").config
DEEPSEEK = catalogue.model("deepseek-v3").config
FP8 = ServingDtypes(weights="fp8", compute="fp8", kv="fp8")


def replica(
    model: str = "llama-3.1-8b", on: str = "h100", split: Split | None = None, dtypes: ServingDtypes | None = None
) -> Replica:
    return Replica(
        config=catalogue.model(model).config,
        cluster=catalogue.cluster(on),
        split=split or Split(),
        dtypes=dtypes or ServingDtypes(),
    )


def faster(cluster: Cluster, *, memory: float = 1.0, flops: float = 1.0, link: float = 1.0) -> Cluster:
    chip = cluster.chip
    assert chip.memory_bytes_per_s is not None
    quicker = replace(
        chip,
        memory_bytes_per_s=chip.memory_bytes_per_s * memory,
        flops={dtype: peak * flops for dtype, peak in chip.flops.items()},
    )
    tiers = tuple(
        replace(tier, link=replace(tier.link, bytes_per_s=(tier.link.bytes_per_s or 1e9) * link))
        for tier in cluster.tiers
    )
    return replace(cluster, chip=quicker, tiers=tiers)


# --- the operations of one device


@pytest.mark.parametrize("config", [LLAMA, MIXTRAL, DEEPSEEK], ids=lambda config: config.name)
def test_equal_sequences_cost_as_much_as_the_same_ones_listed(config) -> None:  # type: ignore[no-untyped-def]
    """The short way (one span, many copies) against spec's own list of every sequence."""
    forward = Forward(config=config, split=Split(), dtypes=ServingDtypes())
    short = [*forward.ops(8, 8, decoding=True), *forward.attention(Group(count=8, queries=1, keys=501))]
    listed = forward_ops(config, make_batch([1] * 8, cached=[500] * 8, logits=8))
    for measure in ("flops", "bytes"):
        assert sum(getattr(op, measure) * count for op, count in short) == pytest.approx(
            sum(getattr(op, measure) for op in listed), rel=2e-3
        )


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_tp_ranks_share_the_products_out(tp: int) -> None:
    whole, part = (Forward(config=LLAMA, split=Split(tp=size), dtypes=ServingDtypes()) for size in (1, tp))
    flops = [
        sum(op.flops * count for op, count in one.ops(64, 64, decoding=True) if op.kind == "matmul")
        for one in (whole, part)
    ]
    assert flops[1] == pytest.approx(flops[0] / tp)


def test_kv_heads_are_repeated_where_ranks_outnumber_them() -> None:
    assert sharded(LLAMA, 16).kv_heads == 1 and sharded(LLAMA, 16).heads == 2
    assert sharded(LLAMA, 4).kv_heads == 2


def test_expert_ranks_read_only_their_experts() -> None:
    alone, spread = (Forward(config=MIXTRAL, split=Split(ep=ranks), dtypes=ServingDtypes()) for ranks in (1, 8))
    read = [
        next(op.bytes_read for op, _ in one.ops(64, 64, decoding=True) if op.name == "moe.gate_up")
        for one in (alone, spread)
    ]
    assert read[1] < read[0] / 6


# --- published latencies


def test_vllm_on_h100_at_concurrency_1() -> None:
    """ITL = 6.44 ms + 43.7 ns a token of context for Llama 3.1 8B in bf16, 23.7 ns with an fp8 cache (vLLM's blog)."""
    for kv, slope_ns in (("bf16", 43.7), ("fp8", 23.7)):
        one = replica(dtypes=ServingDtypes(kv=kv))
        short, long = one.decode(1, 1000).total_s, one.decode(1, 101_000).total_s
        assert short == pytest.approx(6.44e-3, rel=0.1)
        assert (long - short) / 100_000 == pytest.approx(slope_ns * 1e-9, rel=0.15)


def test_a_batch_of_one_reads_the_weights_once() -> None:
    """bytes of the weights / bandwidth is the floor, and nearly all of it at batch 1."""
    one = replica("llama-3.1-70b", "h200")
    weights = 2 * (parameters(one.config).total - parameters(one.config).embedding)
    floor = weights / 4.8e12
    assert floor < one.decode(1, 100).total_s < 1.35 * floor


def test_prefill_is_bound_by_arithmetic() -> None:
    one = replica()
    flops = 2 * parameters(LLAMA).multiplied * 8192
    assert 0.4 < flops / 989.4e12 / one.prefill(8192).total_s < 0.8


def test_the_parts_of_a_step_add_up() -> None:
    step = replica("mixtral-8x7b", "h100x2", Split(tp=2), FP8).decode(64, 1000)
    parts = (step.gemm_s, step.experts_s, step.attention_s, step.other_s, step.kernels_s, step.comm_s, step.host_s)
    assert sum(parts) == pytest.approx(step.total_s) and min(parts[:6]) > 0


@pytest.mark.parametrize(("chips", "wire_of_eight"), [("a100-80gb-sxmx8", 2 * 7 / 8), ("h100x8", 9 / 8)])
def test_an_all_reduce_moves_twice_the_array_but_for_one_share(chips: str, wire_of_eight: float) -> None:
    """A switch that reduces gets the array once from each rank and sends it once, with a share for the ranks' own."""
    two, eight = (replica("llama-3.1-70b", chips, Split(tp=tp)) for tp in (2, 8))
    big = 1e9
    wire = [one.collectives.allreduce_s(big) - one.collectives.allreduce_s(0) for one in (two, eight)]
    assert wire[1] / wire[0] == pytest.approx(wire_of_eight)


# --- what can never happen


batches, contexts = st.integers(1, 256), st.integers(1, 8192)
models = st.sampled_from(["llama-3.1-8b", "mixtral-8x7b", "gpt-j-6b", "gemma-2-9b", "deepseek-v2-lite", "gpt-oss-20b"])


@settings(max_examples=60, deadline=None)
@given(
    models, batches, contexts, st.floats(1, 10), st.sampled_from([ServingDtypes(), FP8, ServingDtypes(weights="int4")])
)
def test_a_faster_chip_never_slows_a_step(
    model: str, batch: int, context: int, factor: float, dtypes: ServingDtypes
) -> None:
    base = replica(model, "h100x2", Split(tp=2), dtypes)
    for better in ({"memory": factor}, {"flops": factor}, {"link": factor}):
        quick = replace(base, cluster=faster(base.cluster, **better))
        assert quick.decode(batch, context).total_s <= base.decode(batch, context).total_s * (1 + 1e-9)
        assert quick.prefill(context, 2).total_s <= base.prefill(context, 2).total_s * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(models, batches, batches, contexts, contexts)
def test_more_work_never_takes_less_time(model: str, batch: int, more: int, context: int, longer: int) -> None:
    one = replica(model)
    assert one.decode(batch + more, context).total_s >= one.decode(batch, context).total_s * (1 - 1e-9)
    assert one.decode(batch, context + longer).total_s >= one.decode(batch, context).total_s * (1 - 1e-9)
    assert one.prefill(context + longer).total_s >= one.prefill(context).total_s * (1 - 1e-9)


@settings(max_examples=30, deadline=None)
@given(batches, contexts)
def test_narrower_weights_and_caches_never_slow_a_decode_step(batch: int, context: int) -> None:
    wide, narrow = replica(), replica(dtypes=FP8)
    assert narrow.decode(batch, context).total_s <= wide.decode(batch, context).total_s


def test_measured_ceilings_take_the_catalogues_place() -> None:
    points = {
        "gemm": ({"m": 8192, "n": 8192, "k": 8192, "dtype": "bf16", "flops": 300e12},),
        "copy": ({"bytes": 1e9, "bytes_per_s": 1e12},),
    }
    slow = replace(replica(), measured=Peaks(device="NVIDIA H100", date="2026-11-15", points=points))
    assert slow.decode(1, 100).total_s > 2.5 * replica().decode(1, 100).total_s
    assert slow.prefill(4096).total_s > 1.5 * replica().prefill(4096).total_s


# --- nonsense


@pytest.mark.parametrize(
    ("split", "message"),
    [
        (Split(tp=3), "tp=3 does not divide 8 KV heads of llama-3.1-8b; try --set layout.tp=2 or 4"),
        (Split(tp=64), "tp=64 does not divide 32 heads of llama-3.1-8b; try --set layout.tp=32"),
        (Split(pp=64), "pp=64 exceeds the 32 layers"),
        (Split(ep=2), "ep=2 needs at least as many experts and llama-3.1-8b has 0"),
    ],
)
def test_a_cut_that_no_engine_runs(split: Split, message: str) -> None:
    with pytest.raises(BadLayout, match=message):
        check_split(LLAMA, split)


def test_a_cut_that_leaves_rows_of_a_dense_layer_over() -> None:
    """Of a model with experts, every kind of layer must divide."""
    model = catalogue.model("deepseek-v2-lite").config
    check_split(model, Split(tp=8))
    with pytest.raises(BadLayout, match=r"tp=8 does not divide the ffn of 10948 in the dense layers .*layout\.tp=4"):
        check_split(replace(model, ffn=10948), Split(tp=8))


def test_a_cut_of_zero() -> None:
    with pytest.raises(BadLayout, match=r"layout\.tp=0 must be at least 1"):
        Split(tp=0)


def test_rates_that_are_none() -> None:
    with pytest.raises(BadInput, match=r"link=0\.0 must be above 0"):
        replace(physics(), link=0.0)


def test_fp16_is_computed_in_fp16() -> None:
    from armillary.planning.serving.deployment_options import serving_dtypes
    from armillary.spec import catalogue

    chip = catalogue.chip("h100-sxm")
    dtypes = serving_dtypes("fp16", chip)
    assert (dtypes.weights, dtypes.compute, dtypes.kv) == ("fp16", "fp16", "fp16")
    assert serving_dtypes("bf16", chip).compute == "bf16"


def test_one_row_of_our_engine_runs_half_the_kernels() -> None:
    """A single row has fused kernels of its own; attention of more is split and summed up. Steps of 229 rows took 14.2
    and 6.37 ms, of 32 rows of about a thousand tokens 6.1 (engine_h200.md)."""
    steps = {
        name: Replica(config=catalogue.model(name).config, cluster=catalogue.cluster("h200x1"), rates=own_rates())
        for name in ("qwen3-8b", "qwen3-0.6b")
    }
    one, two = (steps["qwen3-8b"].decode(rows, 512).kernels_s for rows in (1, 2))
    calls = 36 * (own_rates().decode_attention - 1) * 3e-6 * own_rates().fixed_time
    assert one == pytest.approx((two - calls) / 2)
    assert steps["qwen3-8b"].decode(32, 1024).total_s == pytest.approx(6.1e-3, rel=0.05)
    assert steps["qwen3-8b"].decode(229, 727).total_s == pytest.approx(14.2e-3, rel=0.05)
    assert steps["qwen3-0.6b"].decode(229, 728).total_s == pytest.approx(6.37e-3, rel=0.05)
