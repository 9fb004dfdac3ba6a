"""Rows of a plain all-to-all are sorted by expert; those of DeepEP or HybridEP arrive in order."""

from __future__ import annotations

from dataclasses import replace

import pytest

from armillary.planning.device_model.frameworks import PHYSICS, software
from armillary.planning.device_model.vectorised_layouts import as_arrays
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


def test_a_setting_may_belong_to_one_models_recipe() -> None:
    asked = {"framework": "Megatron-Bridge 25.09", "chip": "h100-sxm"}
    assert software(**asked, model="DeepSeekV3 (dropless)").flex_dispatch
    assert not software(**asked, model="DeepSeekV3 (tokendrop)").flex_dispatch and not software(**asked).flex_dispatch
