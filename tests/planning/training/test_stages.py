"""Stages: the planner prices the very stages that training builds; other software's layers are divided evenly."""

from __future__ import annotations

from dataclasses import replace

import pytest

from armillary.planning.device_model.frameworks import OURS
from armillary.planning.device_model.vectorised_layouts import as_arrays
from armillary.planning.training.memory_breakdown import by_stage, memory
from armillary.planning.training.stages import split, stage_layers
from armillary.planning.training.step_time import step_time
from armillary.spec.layout import Layout
from armillary.spec.layout_rules.pipeline_split import layers_by_stage
from tests.planning.cases import case_of, small_model

PIPELINE = Layout(pp=4, dp=2)


def test_ours_are_those_that_training_builds() -> None:
    case = case_of("llama-3.1-8b", "h100x8", sequence=8192, software=OURS)
    layouts = as_arrays([PIPELINE, Layout(dp=8), Layout(pp=2, interleave=2, schedule="interleaved", dp=4), PIPELINE])
    found = split(case, layouts)
    wanted = [layers_by_stage(case.model, pp, v, sequence=8192) for pp, v in ((4, 1), (1, 1), (2, 2), (4, 1))]
    assert found.fullest.tolist() == [max(counts) for counts in wanted] and found.fullest[0] == 9
    assert found.first.tolist() == [counts[0] for counts in wanted]
    assert found.last(found.mean, found.mean).tolist() == [counts[-1] for counts in wanted]
    assert stage_layers(case, as_arrays([PIPELINE])) == [7, 9, 9, 7]


def test_others_divide_layers_and_leave_the_head_on_top() -> None:
    case = case_of("llama-3.1-8b", "h100x8", sequence=8192)
    assert stage_layers(case, as_arrays([PIPELINE])) == [8, 8, 8, 8]
    head = small_model(num_layers=24, vocab=64_000)
    slow, ours = (
        step_time(case_of(head, "h100x8", software=kind), as_arrays([PIPELINE]))
        for kind in (replace(OURS, balanced_stages=False), OURS)
    )
    assert ours.imbalance[0] < 0.5 * slow.imbalance[0], "a head as long as several layers has fewer beside it"


@pytest.mark.parametrize("vocab", [1_000, 256_000])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_fullest_of_all_stages_counts(vocab: int, schedule: str) -> None:
    case = case_of(small_model(num_layers=13, vocab=vocab), "h100x8", software=OURS)
    layouts = as_arrays([replace(PIPELINE, schedule=schedule)])  # type: ignore[arg-type]
    stages = [float(stage.total[0]) for stage in by_stage(case, layouts)]
    assert len(stages) == 4 and float(memory(case, layouts).total[0]) == pytest.approx(max(stages), rel=1e-3)
