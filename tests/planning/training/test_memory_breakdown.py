"""Memory: the textbook's figures, what ZeRO, recomputation and axes save, and what never raises it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.planning.device_model.frameworks import OURS, Software
from armillary.planning.device_model.vectorised_layouts import as_arrays
from armillary.planning.training.activations import activation_bytes, micro_batches_in_flight
from armillary.planning.training.memory_breakdown import Memory, by_stage, memory
from armillary.planning.training.optimizer_states import state_bytes
from armillary.planning.training.train_case import Lora, TrainCase
from armillary.spec.arithmetic.params import parameters
from armillary.spec.layout import Layout
from armillary.spec.model import MoE
from tests.planning.cases import case_of, small_model

STATES = ("weights", "gradients", "optimizer", "master")


def bytes_of(case: TrainCase, **layout: object) -> Memory:
    return memory(case, as_arrays([Layout(**layout)]))  # type: ignore[arg-type]


def states(found: Memory) -> float:
    return float(sum(getattr(found, name)[0] for name in STATES))


@pytest.mark.parametrize(("parameters_", "bytes_"), [(7e9, 112e9), (13e9, 208e9), (1e12, 16e12)])
def test_sixteen_bytes_a_parameter(parameters_: float, bytes_: float) -> None:
    each = state_bytes(case_of(small_model(), "h100"), as_arrays([Layout()]))
    total = each.weight + each.gradient + each.optimizer + each.master
    assert float(total[0]) * parameters_ == bytes_


def test_states_are_sixteen_bytes_of_every_parameter_the_model_has() -> None:
    case = case_of("llama-2-7b", "h100")
    assert states(bytes_of(case)) == pytest.approx(16 * parameters(case.model).total, rel=1e-4)


def test_zero_stages_share_out_what_the_paper_says() -> None:
    """7.5 B over 64 ranks: 120, 31.4, 16.6 and 1.9 GB (Rajbhandari et al., figure 1)."""
    case = case_of("llama-2-7b", "h100x64", sequences=128)
    count = parameters(case.model).total
    expected = {0: 16.0, 1: 4 + 12 / 64, 2: 2 + 14 / 64, 3: 16 / 64}
    for stage, each in expected.items():
        assert states(bytes_of(case, dp=64, zero=stage)) == pytest.approx(each * count, rel=1e-3)


def test_hybrid_sharding_shares_out_within_its_group() -> None:
    case = case_of("llama-2-7b", "h100x64")
    whole, hybrid = bytes_of(case, dp=64, zero=3), bytes_of(case, dp=64, zero=3, shard=8)
    assert states(hybrid) == pytest.approx(8 * states(whole), rel=1e-3)


def test_activations_are_those_of_korthikanti() -> None:
    """34·hidden a token and layer with dropout's masks, so 32 without, and 5·heads·sequence of scores."""
    model = small_model(heads=16, kv_heads=16, ffn=4096, gated=False, norm="layer", tied=True)
    fused = Software(fused_layers=True)
    case = case_of(model, "h100", software=fused, flash=False, sequence=2048)
    layouts = as_arrays([Layout()])
    expected = 32 * model.hidden + 5 * model.heads * 2048
    assert float(activation_bytes(case, layouts).no_recompute[0]) == pytest.approx(expected, rel=0.01)
    assert float(activation_bytes(case, layouts).selective[0]) == pytest.approx(32 * model.hidden, rel=0.01)


def test_recomputing_more_keeps_less() -> None:
    case = case_of("llama-3-8b", "h100x8")
    found = [bytes_of(case, dp=8, zero=3, recompute=mode) for mode in ("none", "selective", "full")]
    sizes = [float(one.activations[0]) for one in found]
    assert sizes[0] > sizes[1] > sizes[2]


def test_the_first_stage_holds_as_many_micro_batches_as_the_schedule_needs() -> None:
    layouts = as_arrays(
        [Layout(pp=4), Layout(pp=4, interleave=2, schedule="interleaved"), Layout(pp=4, schedule="gpipe")]
    )
    assert micro_batches_in_flight(layouts, np.full(3, 16.0)).tolist() == [4, 4 + 3 / 2, 16]


def test_offload_and_adapters_leave_the_device() -> None:
    case = case_of("llama-2-7b", "h100x8")
    out = bytes_of(case, dp=8, zero=1, offload="optimizer")
    assert out.optimizer[0] == out.master[0] == 0
    adapters = replace(case, lora=Lora(parameters=4_194_304, base_bytes=0.5625))
    frozen = bytes_of(adapters)
    assert frozen.weights[0] < 0.36 * bytes_of(case).weights[0]
    assert frozen.gradients[0] == 2 * 4_194_304


def test_experts_are_shared_out_over_ep() -> None:
    case = case_of("mixtral-8x7b", "h100x8")
    whole, spread = bytes_of(case, dp=8), bytes_of(case, dp=8, ep=8)
    experts = parameters(case.model).experts
    assert whole.weights[0] - spread.weights[0] == pytest.approx(2 * experts * 7 / 8, rel=1e-6)


MODELS = {
    "dense": small_model(),
    "experts": replace(
        small_model(ffn=2048, moe=MoE(num_experts=8, top_k=2, ffn=1024)),
        layers=tuple(replace(kind, mlp="moe") for kind in small_model().layers),
    ),
    "two layers": small_model(num_layers=2),
}


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(MODELS)),
    dp=st.sampled_from([1, 2, 4, 8]),
    tp=st.sampled_from([1, 2, 4]),
    zero=st.integers(0, 3),
    micro_batch=st.sampled_from([1, 2]),
    recompute=st.sampled_from(["none", "selective", "full"]),
    axis=st.sampled_from(["dp", "tp"]),
    pp=st.sampled_from([1, 2]),
)
def test_doubling_an_axis_never_raises_memory(
    name: str, dp: int, tp: int, zero: int, micro_batch: int, recompute: str, axis: str, pp: int
) -> None:
    case = case_of(MODELS[name], "h100x512", sequence=1024, sequences=256)
    layout = Layout(dp=dp, tp=tp, pp=pp, zero=zero, micro_batch=micro_batch, recompute=recompute)  # type: ignore[arg-type]
    twice = replace(layout, **{axis: 2 * getattr(layout, axis)})
    before, after = (float(memory(case, as_arrays([one])).total[0]) for one in (layout, twice))
    assert after <= before * (1 + 1e-9)


def test_many_layouts_at_once_are_each_what_they_are_alone() -> None:
    case = case_of("llama-3-8b", "h100x64")
    layouts = [Layout(dp=64, zero=3), Layout(tp=8, dp=8, zero=1, recompute="full"), Layout(pp=4, dp=16, micro_batch=2)]
    together = memory(case, as_arrays(layouts)).total
    assert together.tolist() == [float(memory(case, as_arrays([one])).total[0]) for one in layouts]


def test_stages_are_listed_from_the_fullest_to_the_last() -> None:
    case = case_of("llama-3-70b", "h100x64", sequences=128)
    layouts = as_arrays([Layout(tp=4, pp=8, dp=2, zero=1)])
    stages = by_stage(case, layouts)
    sizes = [float(stage.total[0]) for stage in stages]
    assert len(sizes) == 8 and max(sizes) == pytest.approx(float(memory(case, layouts).total[0]))
    assert [float(stage.activations[0]) for stage in stages] == sorted([float(s.activations[0]) for s in stages])[::-1]
    assert [float(stage.loss[0]) > 0 for stage in stages] == [False] * 7 + [True]


@pytest.mark.parametrize("cp", [1, 4])
@pytest.mark.parametrize("lora", [None, Lora(parameters=10_000_000), Lora(parameters=10_000_000, base_bytes=0.56)])
def test_doubling_fsdp_never_raises_memory_where_little_is_left_to_share(cp: int, lora: Lora | None) -> None:
    """Frozen weights or optimiser states on the host: only weights are left, and gathered layers stand beside them."""
    case = case_of(small_model(num_layers=16), "h100x1024", sequence=2048, sequences=256, lora=lora)
    sizes = [
        float(memory(case, as_arrays([Layout(dp=dp, zero=3, pp=8, cp=cp, offload="optimizer")])).total[0])
        for dp in (1, 2, 4, 8, 16, 32)
    ]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(
    ("layout", "sequences", "measured"),
    [
        ({"micro_batch": 8}, 8, 58.73e9),
        ({"micro_batch": 8, "recompute": "selective"}, 8, 46.39e9),
        ({"micro_batch": 8}, 16, 63.16e9),
        ({"micro_batch": 4}, 4, 37.68e9),
        ({"micro_batch": 8, "precision": "fp8"}, 8, 53.6e9),
    ],
)
def test_our_trainer_s_memory_on_an_h200(layout: dict[str, object], sequences: int, measured: float) -> None:
    """Peak of the allocator, 1.14 B parameters (2026-11-15): kept, selectively made again, two micro-batches, fp8."""
    model = small_model(hidden=2048, heads=16, kv_heads=8, head_dim=128, ffn=8192, num_layers=16)
    case = case_of(model, "h200", sequences=sequences, software=OURS, loss_chunk=2048)
    assert float(bytes_of(case, **layout).allocated[0]) == pytest.approx(measured, rel=0.07)
