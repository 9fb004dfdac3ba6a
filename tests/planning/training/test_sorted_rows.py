"""Rows of a plain all-to-all are sorted by expert; those of DeepEP or HybridEP arrive in order."""

from __future__ import annotations

from dataclasses import replace

import pytest

from armillary.planning.device_model.frameworks import PHYSICS, software
from armillary.planning.device_model.vectorised_layouts import as_arrays
from armillary.planning.training.activations import IMBALANCE
from armillary.planning.training.op_times import UNFUSED_EXPERTS
from armillary.planning.training.step_time import step_time
from armillary.spec.layout import Layout
from tests.planning.cases import case_of


def test_a_plain_all_to_all_reads_and_writes_every_row_again() -> None:
    case = case_of("mixtral-8x7b", "h100x16", sequences=32)
    layouts = as_arrays([Layout(dp=16, ep=4, zero=1)])
    plain, deep = (
        step_time(replace(case, software=replace(PHYSICS, flex_dispatch=flex)), layouts) for flex in (False, True)
    )
    model, passes, curves = case.model, 4, case.curves  # dispatch and combine, forward and backward
    assert model.moe is not None
    rows_bytes = 2 * model.moe.top_k * model.hidden * case.sequence
    each = 2 * rows_bytes / curves.bytes_per_s + curves.kernel_s
    micro_batches = float(plain.work.micro_batches[0])
    more = micro_batches * model.num_layers * passes * each
    assert plain.memory[0] - deep.memory[0] == pytest.approx(more, rel=0.01)
    alone = as_arrays([Layout(dp=16, ep=8, zero=1)])  # one expert per device: nothing to sort
    same = [step_time(replace(case, software=replace(PHYSICS, flex_dispatch=flex)), alone) for flex in (False, True)]
    assert same[0].memory[0] == same[1].memory[0]


def test_a_device_with_one_expert_has_no_kernels_per_expert() -> None:
    """With ep = experts its rows are one GEMM: only the rank with the most rows is waited for."""
    case = case_of("mixtral-8x7b", "h100x16", sequences=32)
    layouts = as_arrays([Layout(dp=16, ep=ep, zero=1) for ep in (4, 8)])
    apart, fused = (
        step_time(replace(case, software=replace(PHYSICS, fused_experts=fused)), layouts).work.layer
        for fused in (False, True)
    )
    assert case.model.moe is not None and case.model.moe.num_experts == 8
    several, single = apart.gemm_forward / fused.gemm_forward
    assert 1.4 < several < UNFUSED_EXPERTS and 1.0 < single < IMBALANCE


def test_a_setting_may_belong_to_one_models_recipe() -> None:
    asked = {"framework": "Megatron-Bridge 25.09", "chip": "h100-sxm"}
    assert software(**asked, model="DeepSeekV3 (dropless)").flex_dispatch
    assert not software(**asked, model="DeepSeekV3 (tokendrop)").flex_dispatch and not software(**asked).flex_dispatch


def test_a_setting_may_belong_to_one_precision() -> None:
    asked = {"framework": "Megatron-Bridge 26.06", "chip": "gb200", "model": "GPT OSS 120B"}
    assert software(**asked, precision="mxfp8").fused_experts and not software(**asked, precision="bf16").fused_experts


def test_fixed_capacity_spares_the_wait_for_the_host_and_not_the_sorting() -> None:
    case = case_of("mixtral-8x7b", "h100x16", sequences=32)
    layouts = as_arrays([Layout(dp=16, ep=4, zero=1)])
    plain = replace(PHYSICS, flex_dispatch=False)
    both = (plain, replace(plain, static_shapes=True))
    waits, fixed = (step_time(replace(case, software=one), layouts) for one in both)
    assert waits.launch[0] > fixed.launch[0] and waits.memory[0] == fixed.memory[0]


def test_all_to_alls_of_a_model_without_a_pipeline_overlap_where_the_software_does_it() -> None:
    case = case_of("mixtral-8x7b", "h100x16", sequences=64)
    layouts = as_arrays([Layout(dp=16, ep=8, zero=1), Layout(dp=8, pp=2, ep=8, zero=1)])
    exposed = [
        step_time(replace(case, software=replace(PHYSICS, ep_overlap_alone=alone)), layouts).comm_costs["ep"].exposed
        for alone in (False, True)
    ]
    assert exposed[1][0] < 0.5 * exposed[0][0] and exposed[1][1] == exposed[0][1]
