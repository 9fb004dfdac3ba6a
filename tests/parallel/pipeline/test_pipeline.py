"""Pipelines: stages train as one process does, whatever the schedule; what they hold, and how long they stand idle."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from armillary.errors import BadLayout
from armillary.model.transformer import Transformer, build
from armillary.model.weights.hf_weights import save_model
from armillary.parallel.apply import apply
from armillary.parallel.mesh import make_mesh
from armillary.parallel.pipeline.stage import make_stage_model
from armillary.parallel.shard_weights import fill_from, materialise
from armillary.parallel.timers import Pass
from armillary.parallel.world import join_world
from armillary.spec.layout import Layout
from armillary.spec.layout_rules.rules import check_layout
from armillary.spec.model import LayerKind, ModelConfig
from armillary.training.parity.case import Case, many, tiny
from armillary.training.step.loss import loss_sum
from tests.parallel.pipeline.idle_stages import Work, idle_share, measured_idle, replayed_idle, sleeping_pipeline
from tests.parallel.test_strategies import check
from tests.ranks import Ranks

SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero_bubble": 1}
"""schedule -> chunks a stage"""
EVEN = Work(forward_s=1.0, inputs_s=1.0, weights_s=1.0)


def layout(**changes: object) -> Layout:
    return Layout(precision="fp32", **changes)  # type: ignore[arg-type]


def deep(num_layers: int = 4, **changes: object) -> ModelConfig:
    return tiny(layers=(LayerKind(),) * num_layers, **changes)


# --- training


def test_every_schedule_trains_as_one_process_does(ranks: Ranks) -> None:
    cases = [
        Case(layout=layout(pp=2, schedule=name, interleave=chunks), accumulate=4, chunk=20 * (chunks - 1))
        for name, chunks in SCHEDULES.items()
    ]
    cases += [
        Case(layout=layout(pp=2, schedule="zero_bubble", interleave=2), accumulate=4, dtype="fp64", config=deep()),
        Case(layout=layout(pp=2, recompute="full"), accumulate=2, dtype="fp64", documents=True, config=deep(tied=True)),
        Case(layout=layout(pp=2, recompute="full", schedule="zero_bubble"), accumulate=2, dtype="fp64"),
        Case(layout=layout(pp=2), accumulate=1, dtype="fp64", steps=2),
    ]
    check(ranks.run(2, many, cases)[0], cases)


@pytest.mark.slow  # by default test_strategies has such layouts
def test_stages_may_be_copied_cut_and_shared_out(ranks: Ranks) -> None:
    common = dict(accumulate=4, dtype="fp64", steps=2)
    cases = [
        Case(layout=layout(pp=2, dp=2), **common, config=deep(tied=True)),
        Case(layout=layout(pp=2, tp=2), **common, config=deep(tied=True)),
        Case(layout=layout(pp=2, dp=2, zero=3, schedule="interleaved", interleave=2), **common, config=deep()),
        Case(layout=layout(pp=2, dp=2, zero=2, schedule="zero_bubble"), **common, config=deep(tied=True)),
        Case(layout=layout(pp=2, cp=2), **common, documents=True),
    ]
    check(ranks.run(4, many, cases)[0], cases)


@pytest.mark.slow
def test_stages_and_rings_compile(ranks: Ranks) -> None:
    cases = [
        Case(layout=layout(pp=2), accumulate=4, steps=2, compile=True),
        Case(
            layout=layout(pp=2, schedule="interleaved", interleave=2, recompute="full"),
            accumulate=4,
            steps=2,
            compile=True,
        ),
        Case(layout=layout(cp=2), documents=True, steps=2, compile=True),
    ]
    check(ranks.run(2, many, cases, timeout_s=600)[0], cases)


@pytest.mark.slow
def test_eight_stages(ranks: Ranks) -> None:
    cases = [
        Case(layout=layout(pp=8, schedule=name, interleave=chunks), accumulate=8, config=deep(14), dtype="fp64")
        for name, chunks in SCHEDULES.items()
    ]
    check(ranks.run(8, many, cases, timeout_s=600)[0], cases)


# --- what stages hold


def filled_from(folder: str, config: ModelConfig) -> list[str]:
    """Names whose values a stage reads differently from the whole model."""
    with join_world("cpu") as world:
        mesh = make_mesh(layout(pp=2), world)
        with torch.device("meta"):
            model = make_stage_model(config, layout(pp=2), mesh.rank("pp"), sequence=16)
        sharded = apply(model, layout(pp=2), mesh, loss=loss_sum)
        materialise(model, "cpu")
        fill_from(model, folder)
        wanted = dict(build(config, dtype=torch.float32, device="cpu", seed=3).named_parameters())
        return [name for name, value in wanted.items() if not torch.equal(sharded.full_tensor(name), value)]


def test_stages_fill_from_a_folder_and_give_back_the_whole(ranks: Ranks, tmp_path: Path) -> None:
    config = deep(3, tied=True)
    save_model(build(config, dtype=torch.float32, device="cpu", seed=3), tmp_path / "model")
    assert ranks.run(2, filled_from, str(tmp_path / "model"), config) == [[], []]


def test_what_cannot_be_split_is_refused_in_one_line() -> None:
    asked = {"by_trainer": True, "compiled": True}
    for chunks, other in ((1, "1f1b"), (2, "interleaved")):
        split_pass = Layout(pp=2, schedule="zero_bubble", interleave=chunks)
        with pytest.raises(BadLayout, match=rf"cannot be compiled; try --set layout.schedule={other} \(or "):
            check_layout(split_pass, deep(), **asked)
    check_layout(Layout(pp=2, recompute="selective"), deep(), **asked)


# --- bubbles


def passes(schedule: str, chunks: int, micro_batches: int) -> list[Pass]:
    """In the order in which this rank ran them."""
    assert dist.group.WORLD is not None
    pipeline = sleeping_pipeline(
        dist.group.WORLD, Work(forward_s=0.0, inputs_s=0.0, weights_s=0.0), schedule=schedule, chunks=chunks
    )
    measured_idle(pipeline, num_micro_batches=micro_batches, steps=1)
    return pipeline.timer.order


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), pytest.param(4, 8, marks=pytest.mark.slow)])
def test_the_order_that_was_run_idles_as_the_formula_says(ranks: Ranks, stages: int, micro_batches: int) -> None:
    idle = {}
    for schedule, chunks in SCHEDULES.items():
        orders = ranks.run(stages, passes, schedule, chunks, micro_batches)
        for times in ((1.0, 1.0, 1.5), (1.0, 0.8, 1.3), (2.0, 3.0, 2.0), (1.0, 1.0, 1.0)):
            work = Work(**dict(zip(("forward_s", "inputs_s", "weights_s"), times, strict=True)))
            idle[schedule] = replayed_idle(orders, [work] * stages, chunks=chunks)
            formula = idle_share(schedule, work, stages=stages, micro_batches=micro_batches, chunks=chunks)
            assert idle[schedule] == pytest.approx(formula, rel=1e-9), (schedule, times)
    assert idle["zero_bubble"] < idle["interleaved"] < idle["1f1b"] == pytest.approx(idle["gpipe"])


def test_an_order_in_which_stages_wait_for_each_other_is_no_schedule() -> None:
    with pytest.raises(AssertionError, match="waits for another"):
        replayed_idle([[("B", 0, 0), ("F", 0, 0)], [("F", 1, 0), ("B", 1, 0)]], [EVEN, EVEN])


def test_the_slowest_stage_sets_the_pace() -> None:
    """Two stages, one twice as long, three micro-batches: 3 · 6 turns of the long one and 3 of the short one."""
    slow = Work(forward_s=2.0, inputs_s=2.0, weights_s=2.0)
    order = [[(letter, stage, i) for letter in "FB" for i in range(3)] for stage in (0, 1)]
    assert replayed_idle(order, [EVEN, slow]) == pytest.approx(1 - 3 * 4.5 / (3 * 6 + 3))


def slept(schedule: str, chunks: int, micro_batches: int, seconds: float) -> float:
    assert dist.group.WORLD is not None
    work = Work(forward_s=seconds, inputs_s=seconds, weights_s=seconds)
    pipeline = sleeping_pipeline(dist.group.WORLD, work, schedule=schedule, chunks=chunks)
    return measured_idle(pipeline, num_micro_batches=micro_batches)


@pytest.mark.slow
@pytest.mark.parametrize("stages", [2, 4, 8])
def test_stages_that_sleep_idle_as_the_formula_says(ranks: Ranks, stages: int) -> None:
    """On a machine whose cores are not all taken."""
    idle = {}
    for schedule, chunks in SCHEDULES.items():
        idle[schedule] = ranks.run(stages, slept, schedule, chunks, stages, 0.1)[0]
        formula = idle_share(schedule, EVEN, stages=stages, micro_batches=stages, chunks=chunks)
        assert idle[schedule] == pytest.approx(formula, rel=0.15), schedule
    assert idle["zero_bubble"] < idle["1f1b"]


def test_a_stage_knows_the_layers_it_holds() -> None:
    with torch.device("meta"):
        whole = {name for name, _ in Transformer(deep(tied=True)).named_parameters()}
        held = [make_stage_model(deep(tied=True), layout(pp=2), stage, sequence=16) for stage in (0, 1)]
    names = [{name for name, _ in stage.named_parameters()} for stage in held]
    assert names[0] | names[1] == whole | {"output.weight"} and not names[0] & names[1]
    assert (held[0].has_copy, held[1].has_copy) == (False, True)
