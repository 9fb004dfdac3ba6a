"""Runs on several ranks: stopped on one layout and continued on another; all ranks end together, whatever happens."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from armillary.errors import ArmillaryError
from armillary.model.weights.hf_weights import load_model
from armillary.parallel.consensus import AgreedError, Consensus
from armillary.parallel.world import World
from armillary.spec.plan import Plan
from armillary.spec.recipe import Recipe
from armillary.store.gauges import read_gauges
from armillary.store.home import Home
from armillary.store.runs import Run, create_run
from armillary.training.checkpoint import checkpoint
from armillary.training.checkpoint.checkpoint import saved_steps
from armillary.training.loop import train
from armillary.training.prepare_run import ResolvedRun, model_source, resolve_run
from armillary.training.telemetry.step_telemetry import StepReport
from armillary.training.trainer import Trainer
from tests.ranks import Ranks

Make = Callable[..., Recipe]


def begin(recipe: Recipe, home: Home) -> ResolvedRun:
    begun = resolve_run(recipe, home, model_source(recipe, home), cpu_ranks=4)
    begun.prepare()
    return begun


def run_rank(plan: str, folder: str, stop_at: int | None = None, stopper: int = 0, by: str = "signal") -> Any:
    """One rank's part; `stopper` is asked to stop (or fails) once it has seen step `stop_at`."""
    rank = int(os.environ["RANK"])
    made = Plan.from_json(plan)

    def watch(report: StepReport) -> None:
        if report.step == stop_at and by == "signal" and rank == stopper:
            os.kill(os.getpid(), signal.SIGTERM)

    if stop_at is not None and rank == stopper and rank != 0:
        _ask_at(stop_at, by)
    try:
        done = train(made, Run(folder=Path(folder)), watch=watch)
    except ArmillaryError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        _undo()
    return done.steps, done.resumed_at, done.finished, done.loss


def _ask_at(step: int, by: str) -> None:
    """Only the main rank is watched: another is reached through its own step."""
    from armillary.training import step_batches as feed

    original = feed.StepBatches._rows

    def batch(self: Any, number: int) -> Any:
        if number == step and by == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        if number == step and by == "missing shard":
            raise ArmillaryError("shard 00000.bin is missing; prepare the data again")
        return original(self, number)

    feed.StepBatches._rows = batch  # type: ignore[method-assign]
    feed._before_test = original  # type: ignore[attr-defined]


def _undo() -> None:
    from armillary.training import step_batches as feed

    if hasattr(feed, "_before_test"):
        feed.StepBatches._rows = feed._before_test  # type: ignore[method-assign]
        del feed._before_test


def losses(run: Run) -> list[float]:
    """Of each step, the last that was written."""
    found = {record["step"]: record["loss"] for record in read_gauges(run.gauges)}
    return [found[step] for step in sorted(found)]


def on_ranks(ranks: Ranks, begun: ResolvedRun, run: Run, *args: Any) -> list[Any]:
    """Train on as many ranks as the plan's layout has; one is this process."""
    count = begun.plan.layout.num_devices
    if count == 1:
        done = train(begun.plan, run, watch=_stop_after(args[0]) if args else None)
        return [(done.steps, done.resumed_at, done.finished, done.loss)]
    return ranks.run(count, run_rank, begun.plan.to_json(), str(run.folder), *args)


def _stop_after(step: int) -> Callable[[StepReport], None]:
    def watch(report: StepReport) -> None:
        if report.step == step:
            os.kill(os.getpid(), signal.SIGTERM)

    return watch


CHAIN = [
    ["layout.dp=1"],
    ["layout.dp=2", "layout.zero=1", "layout.micro_batch=2", "layout.offload=optimizer"],
    ["layout.dp=2", "layout.tp=2", "layout.zero=2", "layout.recompute=full"],
    ["layout.pp=2", "layout.micro_batch=2", "layout.offload=both"],
    ["layout.cp=2", "layout.zero=3", "layout.micro_batch=2", "layout.offload=nvme"],
    ["layout.dp=1", "layout.recompute=selective"],
]
LONGER = [
    ["layout.dp=4", "layout.zero=3", "layout.shard=2", "layout.micro_batch=1"],
    ["layout.tp=2", "layout.micro_batch=8"],
    ["layout.cp=2", "layout.dp=2", "layout.zero=3", "layout.micro_batch=2"],
    ["layout.pp=2", "layout.dp=2", "layout.zero=1", "layout.micro_batch=1", "layout.schedule=zero_bubble"],
    ["layout.dp=2"],
]
"""layouts through which one run is handed on"""


@pytest.mark.parametrize(
    "chain",
    [
        pytest.param([*CHAIN[2:5], CHAIN[0]], marks=pytest.mark.slow),
        pytest.param(CHAIN, marks=pytest.mark.slow),
        pytest.param([*LONGER, *CHAIN], marks=pytest.mark.slow),
    ],
    ids=["few", "some", "more"],
)
def test_a_run_goes_on_on_any_layout(chain: list[list[str]], recipe: Make, home: Home, ranks: Ranks) -> None:
    common = [f"train.steps={3 * len(chain)}", "train.eval_every=0"]
    reference = begin(recipe(*common), home)
    whole = train(reference.plan, reference.create_run())
    run, at = reference.create_run(), 0
    for number, layout in enumerate(chain):
        begun = begin(recipe(*common, *layout), home)
        last = number + 1 == len(chain)
        answers = on_ranks(ranks, begun, run, *([] if last else [at]))
        assert len(set(answers)) == 1, "every rank ends alike"
        steps, resumed, finished, _ = answers[0]
        assert (resumed, finished) == (at, last) and steps > at
        at = steps
    assert losses(run) == pytest.approx(losses(whole.run), rel=1e-6)
    assert whole.export is not None
    exports = (run.latest_export(), whole.export)
    ours, theirs = (dict(load_model(folder).named_parameters()) for folder in exports if folder)
    for name, expected in theirs.items():
        assert torch.dist(ours[name], expected) <= 1e-5 * expected.norm(), name


TP = pytest.param(["layout.tp=2"], marks=pytest.mark.slow)


@pytest.mark.parametrize("layout", [["layout.dp=2", "layout.zero=3"], TP], ids=["fsdp", "tp"])
def test_the_same_layout_goes_on_with_the_same_bits(layout: list[str], recipe: Make, home: Home, ranks: Ranks) -> None:
    begun = begin(recipe("train.steps=5", "train.save_every=2", "layout.precision=bf16", *layout), home)
    whole, cut = begun.create_run(), begun.create_run()
    on_ranks(ranks, begun, whole)
    on_ranks(ranks, begun, cut, 1)
    steps = saved_steps(cut)[-1]
    assert 2 <= steps < 5, "stopped after the step, and saved"
    on_ranks(ranks, begun, cut)
    assert losses(cut) == losses(whole)


@pytest.mark.parametrize("layout", [["layout.pp=2"], ["layout.cp=2", "layout.zero=3"]], ids=["pp", "cp"])
def test_stages_and_shared_rows_validate_as_one_process(
    layout: list[str], recipe: Make, home: Home, ranks: Ranks
) -> None:
    common = ["train.steps=3", "train.eval_every=3", "layout.micro_batch=2"]
    whole = train((one := begin(recipe(*common), home)).plan, one.create_run())
    begun = begin(recipe(*common, *layout), home)
    on_ranks(ranks, begun, run := begun.create_run())
    found = list(read_gauges(run.gauges))
    values = [record["val_loss"] for record in found if "val_loss" in record]
    assert values == pytest.approx([whole.val_loss], rel=1e-6)
    bubbles = [record["bubble_s"] for record in found if "bubble_s" in record]
    assert len(bubbles) == (3 if "layout.pp=2" in layout else 0) and all(value > 0 for value in bubbles)


def test_one_rank_asked_to_stop_stops_all_at_the_same_step(recipe: Make, home: Home, ranks: Ranks) -> None:
    begun = begin(recipe("train.steps=50", "layout.dp=2"), home)
    run = begun.create_run()
    answers = on_ranks(ranks, begun, run, 3, 1)
    assert len(set(answers)) == 1 and not answers[0][2]
    assert run.state.state == "interrupted" and saved_steps(run) == [answers[0][0]]


def test_what_one_rank_cannot_read_is_said_by_all(recipe: Make, home: Home, ranks: Ranks) -> None:
    begun = begin(recipe("train.steps=9", "train.save_every=2", "layout.dp=2", "layout.zero=3"), home)
    run = begun.create_run()
    answers = on_ranks(ranks, begun, run, 5, 1, "missing shard")
    assert answers == ["AgreedError: shard 00000.bin is missing; prepare the data again"] * 2
    assert run.state.state == "failed" and saved_steps(run)[-1] == 4


def run_rank_of_many(plan: str, folder: str, *args: Any) -> tuple[Any, dict[int, int]]:
    """As `run_rank`, as if two ranks were many; also how often ranks exchanged something for each step's batch."""
    from armillary.training import step_batches as feed

    calls, fetch, total = {}, feed.StepBatches.at, Consensus.total
    begun: list[int] = []

    def at(self: Any, step: int, stop: Any) -> Any:
        begun.append(step)
        try:
            return fetch(self, step, stop)
        finally:
            begun.pop()

    def counted(self: Consensus, *values: float) -> tuple[float, ...]:
        if begun:
            calls[begun[-1]] = calls.get(begun[-1], 0) + 1
        return total(self, *values)

    with (
        mock.patch.multiple(feed, MANY_RANKS=1, AT_ONCE_S=1e9),
        mock.patch.object(feed.StepBatches, "at", at),
        mock.patch.object(Consensus, "total", counted),
    ):
        return run_rank(plan, folder, *args), calls


def test_many_ranks_agree_on_several_steps_at_once(recipe: Make, home: Home, ranks: Ranks) -> None:
    """Once for 8 steps, as soon as the time of a step is known, with the same losses and checkpoints."""
    begun = begin(recipe("train.steps=20", "train.save_every=5", "layout.dp=2"), home)
    usual, many = begun.create_run(), begun.create_run()
    on_ranks(ranks, begun, usual)
    answers = ranks.run(2, run_rank_of_many, begun.plan.to_json(), str(many.folder))
    assert [calls for _, calls in answers] == [{0: 1, 1: 1, 2: 1, 10: 1, 18: 1}] * 2
    assert losses(many) == losses(usual) and saved_steps(many) == saved_steps(usual)
    known = {record["step"] for record in read_gauges(many.gauges) if "rank_spread_s" in record}
    assert known <= {0, 1, 2, 10, 18} and {10, 18} <= known


@pytest.mark.parametrize("rank", [0, 1])
def test_many_ranks_stop_within_those_steps(rank: int, recipe: Make, home: Home, ranks: Ranks) -> None:
    begun = begin(recipe("train.steps=50", "layout.dp=2"), home)
    run = begun.create_run()
    asked_at = 4 if rank == 0 else 12  # of the other rank when it reads the rows of that step
    answers = ranks.run(2, run_rank_of_many, begun.plan.to_json(), str(run.folder), asked_at, rank)
    steps = {steps for (steps, *_), _ in answers}
    assert steps == {10} and run.state.state == "interrupted" and saved_steps(run) == [10]


def test_many_ranks_do_the_steps_before_what_one_cannot_read(recipe: Make, home: Home, ranks: Ranks) -> None:
    begun = begin(recipe("train.steps=20", "train.save_every=1", "layout.dp=2"), home)
    run = begun.create_run()
    answers = ranks.run(2, run_rank_of_many, begun.plan.to_json(), str(run.folder), 13, 1, "missing shard")
    assert [said for said, _ in answers] == ["AgreedError: shard 00000.bin is missing; prepare the data again"] * 2
    assert run.state.state == "failed" and saved_steps(run)[-1] == 13 and {13: 1}.items() <= answers[0][1].items()


def test_nan_ends_every_rank_with_one_line(recipe: Make, home: Home, ranks: Ranks) -> None:
    begun = begin(recipe("train.lr=1e30", "train.warmup_steps=0", "train.clip=0", "layout.dp=2"), home)
    answers = on_ranks(ranks, begun, begun.create_run())
    assert len(set(answers)) == 1 and "at step" in answers[0] and "try --set train.lr=" in answers[0]


def validate_without_a_shard(plan: str) -> str:
    from armillary.training.data.batch_sources import Validation

    ranks = Consensus(rank=dist.get_rank(), size=dist.get_world_size())
    world = World(rank=ranks.rank, size=ranks.size, local_rank=ranks.rank, device=torch.device("cpu"))
    original = Validation.batches

    def missing(self: Validation, **options: Any) -> Iterator[Any]:
        yield from original(self, **{**options, "limit": 1})
        if ranks.rank == 1:
            raise ArmillaryError("shard 00000.bin is missing; prepare the data again")

    Validation.batches = missing  # type: ignore[method-assign]
    try:
        with Trainer(Plan.from_json(plan), world, ranks) as trainer:
            trainer.validate()
    except AgreedError as error:
        return str(error)
    finally:
        Validation.batches = original  # type: ignore[method-assign]
    return ""


def test_held_out_text_that_one_rank_cannot_read_is_said_by_all(recipe: Make, home: Home, ranks: Ranks) -> None:
    begun = begin(recipe("layout.dp=2", "layout.zero=3"), home)
    said = ranks.run(2, validate_without_a_shard, begun.plan.to_json())
    assert said == ["shard 00000.bin is missing; prepare the data again"] * 2


def read_into_another_shape(folder: str) -> str:
    ranks = Consensus(rank=dist.get_rank(), size=dist.get_world_size())
    run = Run(folder=Path(folder))
    checkpoint.save(run, 1, {"a": torch.ones(4)}, {}, ranks)
    assert checkpoint.newest(run, ranks) == 1
    try:
        checkpoint.load(run.checkpoint(1), {"a": torch.ones(5)}, ranks)
    except AgreedError as error:
        return str(error)
    return ""


def test_a_checkpoint_that_cannot_be_read_is_one_line_of_all(home: Home, ranks: Ranks) -> None:
    one, other = ranks.run(2, read_into_another_shape, str(create_run(home, {}).folder))
    assert one == other and "is no checkpoint of this model" in one and "\n" not in one


def damaged_on_two(folder: str) -> tuple[int, list[str]]:
    ranks, said = Consensus(rank=dist.get_rank(), size=dist.get_world_size()), list[str]()
    run = Run(folder=Path(folder))
    for step in (1, 2):
        checkpoint.save(run, step, {f"of_rank_{ranks.rank}": torch.full((4,), float(step))}, {}, ranks)
    path = run.checkpoint(2) / "__1_0.distcp"
    if not ranks.is_main:
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    dist.barrier()
    return checkpoint.newest(run, ranks, said.append), said


def test_damage_is_seen_by_all_ranks_and_said_by_one(home: Home, ranks: Ranks) -> None:
    run = create_run(home, {})
    one, other = ranks.run(2, damaged_on_two, str(run.folder))
    assert other == (1, [])
    assert one == (
        1,
        [
            f"checkpoint 2 of run {run.name} is damaged (the content of __1_0.distcp has changed), kept as 2.damaged; "
            "the run continues from step 1"
        ],
    )


def test_fewer_ranks_than_the_layout_are_refused(recipe: Make, home: Home, ranks: Ranks) -> None:
    begun = begin(recipe("layout.dp=4", "layout.micro_batch=2"), home)
    (first, second) = ranks.run(2, run_rank, begun.plan.to_json(), str(begun.create_run().folder))
    assert first == second and "dp=4 needs 4 processes and 2 are running" in first
