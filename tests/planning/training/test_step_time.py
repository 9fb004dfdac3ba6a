"""Step time: terms that add up, textbook collectives and bubbles, and what never slows a plan."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.errors import BadInput
from armillary.planning.device_model.frameworks import (
    MOST_PARAMETERS,
    OURS_BY_LAYER,
    common_numbers,
    declared,
    software,
)
from armillary.planning.device_model.network import Network, Ring, network
from armillary.planning.device_model.vectorised_layouts import PRECISIONS, Layouts, as_arrays
from armillary.planning.training.layout_prediction import predict
from armillary.planning.training.memory_breakdown import memory
from armillary.planning.training.step_time import StepTime, step_time
from armillary.planning.training.train_case import Lora
from armillary.profiling.analysis.amdahl import speedup
from armillary.spec import catalogue
from armillary.spec.layout import Layout
from armillary.spec.model import LayerKind, MoE
from armillary.store.peaks import new_peaks
from tests.planning.cases import case_of, quicker, small_model


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def one(**layout: object) -> Layouts:
    return as_arrays([Layout(**layout)])  # type: ignore[arg-type]


# --- textbook


@pytest.mark.parametrize("members", [2, 8, 64])
def test_a_ring_all_reduce_moves_two_times_n_minus_one_over_n(members: int) -> None:
    flat = Network(rings=(Ring(reach=64, bytes_per_s=1e9, latency_s=0.0),))
    seconds = flat.ring_s("all_reduce", 1e9, ints(members), ints(1))
    assert seconds[0] == pytest.approx(2 * (members - 1) / members)
    assert flat.ring_s("all_gather", 1e9, ints(members), ints(1))[0] == pytest.approx((members - 1) / members)


def test_between_nodes_a_byte_enters_each_node_once_over_all_its_links() -> None:
    nodes = network(catalogue.cluster("h100x64"))
    near, far = nodes.rings
    size = 1e10
    spread = nodes.ring_s("all_gather", size, ints(64), ints(1))[0]  # all 8 of each of 8 nodes
    apart = nodes.ring_s("all_gather", size, ints(8), ints(8))[0]  # one of each node
    assert spread == pytest.approx(max(size * 7 / 8 / near.bytes_per_s, size * 7 / 8 / (8 * far.bytes_per_s)), rel=0.05)
    assert apart == pytest.approx(size * 7 / 8 / far.bytes_per_s, rel=0.05)


def test_gpipe_idles_p_minus_one_of_m_plus_p_minus_one() -> None:
    model = small_model(num_layers=8, vocab=256, tied=True)
    case = replace(case_of(model, "h100x4", sequences=32), software=software("x"))
    found = step_time(case, one(pp=4, schedule="gpipe"))
    busy = found.compute + found.exposed + found.fill
    assert float((found.fill / busy)[0]) == pytest.approx(3 / (32 + 3), rel=0.12)


def test_interleaving_divides_the_bubble() -> None:
    case = case_of("llama-3-8b", "h100x8", sequences=64)
    plain, chunked = (
        step_time(case, one(pp=8, interleave=v, schedule=name)) for v, name in ((1, "1f1b"), (4, "interleaved"))
    )
    assert float(chunked.fill[0]) == pytest.approx(float(plain.fill[0]) / 4, rel=0.02)
    zero = step_time(case, one(pp=8, schedule="zero_bubble"))
    assert zero.fill[0] < 0.7 * plain.fill[0]


def test_work_that_is_99_percent_parallel_speeds_up_100_times_at_most() -> None:
    assert speedup(0.99, float("inf")) == pytest.approx(100)


def test_our_experts_on_an_h200() -> None:
    """8 experts of 4,096, two a token, 1.14 B active (2026-11-15, experts_h200.md): 496 to 510 ms, 101 GB."""
    moe, layers = MoE(num_experts=8, top_k=2, ffn=4096), tuple(LayerKind(mlp="moe") for _ in range(16))
    model = replace(small_model(hidden=2048, heads=16, head_dim=128), ffn=0, moe=moe, layers=layers)
    case = case_of(model, "h200", sequences=8, software=OURS_BY_LAYER, loss_chunk=2048)
    layouts = one(micro_batch=8)
    assert float(step_time(case, layouts).total[0]) == pytest.approx(0.503, rel=0.1)
    assert float(memory(case, layouts).allocated[0]) == pytest.approx(101e9, rel=0.07)


# --- terms


def parts(found: StepTime) -> float:
    return float((found.compute + found.exposed + found.bubble + found.overhead)[0])


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=64, zero=3, recompute="full"),
        Layout(dp=8, tp=8, zero=1),
        Layout(dp=2, tp=4, pp=4, cp=2, zero=1),
        Layout(dp=4, tp=2, pp=8, interleave=4, schedule="interleaved", precision="fp8"),
    ],
)
def test_a_step_is_the_sum_of_its_terms_and_no_term_is_negative(layout: Layout) -> None:
    case = case_of("llama-3-8b", "h100x64", sequences=128)
    found = step_time(case, as_arrays([layout]))
    assert float(found.total[0]) == pytest.approx(parts(found), rel=1e-12)
    names = ("gemm", "attention", "memory", "recompute", "contention", "fill", "imbalance", "optimizer", "launch")
    assert all(float(getattr(found, name)[0]) >= 0 for name in names)
    assert all(0 <= one.exposed[0] <= one.total[0] * (1 + 1e-9) for one in found.comm_costs.values())


def test_nothing_beats_the_peak() -> None:
    case = case_of("llama-3-70b", "h100x64", sequences=128)
    found = predict(case, one(dp=2, tp=8, pp=4, zero=1))
    assert 0.2 < found.mfu[0] < 0.64
    assert found.hfu() > found.mfu[0]


def test_experts_exchange_rows_and_dense_models_do_not() -> None:
    moe = step_time(case_of("mixtral-8x7b", "h100x8"), one(dp=8, ep=8))
    dense = step_time(case_of("llama-3-8b", "h100x8"), one(dp=8))
    assert moe.comm_costs["ep"].total[0] > 0 == dense.comm_costs["ep"].total[0]


def test_adapters_save_the_weight_gradients() -> None:
    case = case_of("llama-3-8b", "h100")
    full, lora = (
        float(step_time(one_case, one()).gemm[0])
        for one_case in (case, replace(case, lora=Lora(parameters=10_000_000)))
    )
    assert lora == pytest.approx(full * 2 / 3, rel=0.05)


def test_recomputing_whole_layers_costs_a_third_more() -> None:
    case = case_of("llama-3-8b", "h100x8")
    plain, again = (step_time(case, one(dp=8, zero=3, recompute=mode)) for mode in ("none", "full"))
    assert float(again.recompute[0]) == pytest.approx(float(plain.compute[0]) / 3, rel=0.25)


def test_many_layouts_at_once_are_each_what_they_are_alone() -> None:
    case = case_of("mixtral-8x7b", "h100x64", sequences=128)
    layouts = [
        Layout(dp=64, zero=3, ep=8),
        Layout(tp=8, dp=8, zero=1, recompute="full", precision="fp8"),
        Layout(pp=4, dp=16, micro_batch=2, ep=4),
    ]
    together = step_time(case, as_arrays(layouts)).total
    assert together.tolist() == pytest.approx(
        [float(step_time(case, as_arrays([x])).total[0]) for x in layouts], rel=1e-12
    )


# --- properties


@settings(max_examples=60, deadline=None)
@given(
    layout=st.sampled_from(
        [
            Layout(dp=64, zero=3),
            Layout(dp=64, zero=1, micro_batch=2),
            Layout(dp=8, tp=8, zero=1),
            Layout(dp=4, tp=4, pp=4, zero=1),
            Layout(dp=8, tp=2, pp=4, interleave=2, schedule="interleaved", zero=2),
            Layout(dp=16, cp=4, zero=3, recompute="full"),
            Layout(dp=16, tp=4, precision="fp8", recompute="selective"),
        ]
    ),
    model=st.sampled_from(["llama-3-8b", "mixtral-8x7b"]),
    which=st.sampled_from(["links", "memory", "flops"]),
    times=st.floats(1.0, 16.0),
)
def test_a_faster_machine_never_slows_a_plan(layout: Layout, model: str, which: str, times: float) -> None:
    case = case_of(model, "h100x64", sequences=128)
    fast = replace(case, cluster=quicker(case.cluster, **{which: times}))
    before, after = (float(step_time(one_case, as_arrays([layout])).total[0]) for one_case in (case, fast))
    assert after <= before * (1 + 1e-9)


def test_measured_ceilings_replace_the_catalogue() -> None:
    peaks = new_peaks("NVIDIA H100 80GB HBM3")
    peaks = peaks.with_points("gemm", [{"m": 8192, "n": 8192, "k": 8192, "dtype": "bf16", "flops": 3e14}])
    peaks = peaks.with_points("copy", [{"bytes": 2**30, "bytes_per_s": 1e12}])
    case = case_of("llama-3-8b", "h100")
    slow = replace(case, measured=peaks)
    assert "measured" in slow.curves.source and slow.curves.achieved["bf16"] == 3e14
    assert step_time(slow, one()).total[0] > 1.5 * step_time(case, one()).total[0]


def test_a_row_of_products_is_held_to_the_power_limit() -> None:
    """Large ones run at the lasting rate whatever their shape, small ones at what a burst of their shape reaches."""
    point = {"m": 8192, "n": 8192, "k": 8192, "dtype": "bf16", "flops": 8e14, "beside": {"sustained_flops": 6.7e14}}
    peaks = new_peaks("NVIDIA H200").with_points("gemm", [point])
    peaks = peaks.with_points("copy", [{"bytes": 2**30, "bytes_per_s": 4e12}])
    found = replace(case_of("llama-3-8b", "h200"), measured=peaks).curves
    bf16, sizes = ints(PRECISIONS.index("bf16")), [np.array([float(size)]) for size in (32768, 4096, 2048)]
    assert found.gemm_flops(bf16, *sizes)[0] == 6.7e14 == found.sustained("bf16")
    assert found.gemm_flops(bf16, *(size / 8 for size in sizes))[0] < 5e14


def test_measured_attention_is_what_its_length_is_priced_at() -> None:
    shape = {"keys": 4096, "head_dim": 128, "dtype": "bf16"}
    points = [shape | {"backward": False, "flops": 5.4e14}, shape | {"backward": True, "flops": 4e14}]
    peaks = new_peaks("NVIDIA H200").with_points("attention", points)
    found = replace(case_of("llama-3-8b", "h200"), measured=peaks).curves
    for backward, rate in ((False, 5.4e14), (True, 4e14)):
        assert found.attention_flops(4096, 128, backward=backward) == pytest.approx(rate)
        assert found.attention_flops(512, 128, backward=backward) < 0.8 * rate


def test_measured_collectives_give_the_rate_of_the_innermost_link() -> None:
    point = {"op": "all_reduce", "world": 8, "alpha_s": 7e-5, "bytes_per_s": 1e11}
    measured = network(catalogue.cluster("h100x16"), new_peaks("x").with_points("collective", [point]))
    assert measured.rings[0].bytes_per_s == pytest.approx(1e11 * 2 * 7 / 8)
    assert measured.rings[0].latency_s == pytest.approx(1e-5)
    assert measured.rings[1] == network(catalogue.cluster("h100x16")).rings[1]


def test_a_measured_loader_that_is_too_slow_starves_the_step() -> None:
    peaks = new_peaks("NVIDIA H100 80GB HBM3")
    slow, quick = (peaks.with_points("loader", [{"path": "x", "tokens": rate, "seconds": 1.0}]) for rate in (1e3, 1e9))
    case = case_of("llama-3-8b", "h100")
    starved, fed = (step_time(replace(case, measured=one_of), one()) for one_of in (slow, quick))
    assert starved.data[0] > 0 == fed.data[0]
    assert starved.total[0] == pytest.approx(case.batch_tokens / 1e3, rel=0.02)


def test_a_chip_of_which_nothing_is_known_is_refused() -> None:
    chip = replace(catalogue.chip("h100"), flops={}, memory_bytes_per_s=None)
    case = case_of("llama-3-8b", "h100")
    with pytest.raises(BadInput, match="armillary bench ceilings"):
        step_time(replace(case, cluster=replace(case.cluster, chip=chip)), one())


# --- software


def test_no_framework_declares_more_than_two_numbers() -> None:
    assert all(len(one_of.fitted) <= MOST_PARAMETERS for one_of in declared().values())


def test_releases_are_one_framework_and_differ_in_settings_only() -> None:
    asked = {"chip": "gb200", "model": "DeepSeekV3", "precision": "mxfp8"}
    old, new = (software(f"Megatron-Bridge {release}", **asked) for release in ("25.09", "26.08"))
    assert old.fitted == new.fitted and not old.fused_experts and new.fused_experts
    assert software("Megatron-Bridge 26.08", chip="gb200", fitted=False).fitted == {}
    assert software("somebody's trainer").fitted == common_numbers() and software("x", fitted=False).fitted == {}


# --- one window is spent once


@pytest.mark.parametrize("which", ["flops", "memory", "links"])
@pytest.mark.parametrize("offload", ["none", "activations", "both"])
def test_a_faster_machine_never_slows_what_waits_for_several_exchanges(which: str, offload: str) -> None:
    """Slow links, interleaving, zero 3 and offload all want the same computation to hide behind."""
    case = case_of("tinyllama-1.1b", "rtx-4090x4096", sequence=2048, sequences=64 * 32)
    layout = Layout(dp=64, zero=3, pp=8, interleave=2, schedule="interleaved", cp=2, offload=offload)  # type: ignore
    faster = replace(case, cluster=quicker(case.cluster, **{which: 10.0}))
    slow, quick = predict(case, as_arrays([layout])), predict(faster, as_arrays([layout]))
    assert quick.time.total[0] <= slow.time.total[0] * (1 + 1e-9)
