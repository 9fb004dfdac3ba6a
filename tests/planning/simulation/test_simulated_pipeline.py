"""Pipelines played through: the orders are torch's, and idle shares are the planner's formula."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from armillary.planning.simulation.pipeline_order import pipeline_order
from armillary.planning.simulation.simulated_pipeline import PipelineCase, StageSeconds, idle_fraction, seconds
from armillary.planning.training.step_time import idle_s

SHAPES = [("gpipe", 4, 1, 6), ("1f1b", 4, 1, 8), ("interleaved", 4, 2, 8), ("zero_bubble", 4, 1, 8)]
SHAPES += [("interleaved", 2, 3, 4), ("zero_bubble", 2, 2, 4), ("1f1b", 3, 1, 2)]


def torchs_order(name: str, stages: int, chunks: int, batches: int) -> list[list[tuple[str, int, int]]]:
    """As torch plans it, without its waits."""
    from torch.distributed.pipelining import schedules

    kinds = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
    made: Any = {
        "interleaved": schedules.ScheduleInterleaved1F1B,
        "zero_bubble": schedules.ScheduleInterleavedZeroBubble,
    }[name]
    orders = []
    for rank in range(stages):
        plan = SimpleNamespace(
            n_local_stages=chunks,
            pp_group_size=stages,
            _n_microbatches=batches,
            microbatches_per_round=batches // max(1, batches // stages),
            rank=rank,
        )
        actions = made._calculate_single_rank_operations(plan, rank)
        orders.append(
            [(kinds[x.computation_type.name], x.stage_index, x.microbatch_index) for x in actions if x is not None]
        )
    return orders


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[0] in ("interleaved", "zero_bubble")])
def test_orders_are_torchs(shape: tuple[str, int, int, int]) -> None:
    assert [[tuple(each) for each in order] for order in pipeline_order(*shape)] == torchs_order(*shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_pass_runs_once_and_after_what_it_needs(shape: tuple[str, int, int, int]) -> None:
    schedule, stages, chunks, batches = shape
    work = StageSeconds(forward_s=1.0, inputs_s=1.1, weights_s=0.9)
    case = PipelineCase(schedule=schedule, stages=[work] * stages, chunks=chunks, micro_batches=batches, send_s=0.05)
    played = case.play(noise=0.1, seed=3)
    done = {(each.work.kind.replace("I", "B"), *each.work[1:]): each for each in played}
    kinds = 3 if schedule == "zero_bubble" else 2
    assert len(done) == len(played) == kinds * stages * chunks * batches
    for each in played:
        if each.work.kind == "F" and each.work.chunk:
            assert each.begin_s >= done["F", each.work.chunk - 1, each.work.batch].end_s
        if each.work.kind == "W":
            assert each.begin_s >= done["B", each.work.chunk, each.work.batch].end_s


@pytest.mark.parametrize(("schedule", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1)])
def test_equal_stages_stand_idle_as_the_formula_says(schedule: str, chunks: int) -> None:
    work, stages, batches = StageSeconds(forward_s=1.0, inputs_s=1.2, weights_s=0.8), 4, 8
    case = PipelineCase(schedule=schedule, stages=[work] * stages, chunks=chunks, micro_batches=batches)
    fill = float(idle_s(schedule == "zero_bubble", stages, chunks, 1.0, 2.0, 0.8))
    assert seconds(case.play()) == pytest.approx(batches * 3.0 + fill)
    assert idle_fraction(case.play(), stages) == pytest.approx(fill / (batches * 3.0 + fill))


def test_a_slow_stage_holds_up_all() -> None:
    work = StageSeconds(forward_s=1.0, inputs_s=1.0, weights_s=1.0)
    case = PipelineCase(schedule="1f1b", stages=[work] * 4, chunks=1, micro_batches=32)
    slow = seconds(case.play(slow=2, slowdown=1.5)) / seconds(case.play())
    assert 1.4 < slow < 1.5
