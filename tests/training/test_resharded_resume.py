"""A checkpoint of four ranks (FSDP × tensor parallelism) continues on other numbers of ranks and other layouts, with
the same samples in every step, and the same losses.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from armillary.spec.plan import Plan
from armillary.spec.recipe import Recipe
from armillary.store.gauges import read_gauges
from armillary.store.home import Home
from armillary.store.runs import Run
from armillary.training.data.loader import DeviceBatch
from armillary.training.loop import train
from armillary.training.prepare_run import ResolvedRun, model_source, resolve_run
from armillary.training.step_batches import StepBatches
from tests.ranks import Ranks
from tests.training.step.test_router_balance import MIXTRAL, decided

Make = Callable[..., Recipe]
Rows = dict[int, dict[int, list[str]]]
"""step -> data-parallel rank -> digest of each row"""
SAVED, STEPS = 4, 8
FOUR = ["layout.dp=2", "layout.tp=2", "layout.zero=3"]
FEW = {"pipeline": ["layout.pp=2", "layout.micro_batch=2"]}
MORE = {
    "one rank": ["layout.dp=1"],
    "two ranks": ["layout.dp=2", "layout.zero=2"],
    "tensor parallelism": ["layout.tp=2"],
    "eight ranks": ["layout.dp=8", "layout.zero=3", "layout.micro_batch=1"],
    "eight ranks, FSDP × tp": ["layout.dp=4", "layout.tp=2", "layout.zero=3", "layout.micro_batch=2"],
    "context parallelism": ["layout.cp=2", "layout.dp=2", "layout.micro_batch=2"],
    "pipeline × FSDP": ["layout.pp=2", "layout.dp=2", "layout.zero=1", "layout.micro_batch=1"],
}
WITH_EXPERTS = {
    "one rank": ["layout.dp=1"],
    "expert parallelism": ["layout.dp=2", "layout.ep=2"],
    "experts on four": ["layout.dp=4", "layout.ep=4", "layout.micro_batch=2"],
    "experts in a pipeline": ["layout.dp=2", "layout.pp=2", "layout.ep=2", "layout.micro_batch=2"],
    "experts on eight": ["layout.dp=8", "layout.ep=8", "layout.micro_batch=1"],
}


def run_rank(plan: str, folder: str) -> tuple[int, Rows]:
    """Train; where it resumed, and the rows that this rank has read."""
    seen: Rows = {}
    original = StepBatches._rows

    def noted(self: StepBatches, step: int) -> DeviceBatch:
        rows = original(self, step)
        digests = [blake2b(row.numpy().tobytes(), digest_size=8).hexdigest() for row in rows.tokens_BT]
        seen.setdefault(step, {})[self._mesh.dp_rank] = digests
        return rows

    with mock.patch.object(StepBatches, "_rows", noted):
        done = train(Plan.from_json(plan), Run(folder=Path(folder)))
    return done.resumed_at, seen


def trained(begun: ResolvedRun, run: Run, ranks: Ranks) -> tuple[int, dict[int, list[str]]]:
    """Where it resumed, and the rows of each step over all ranks, in order."""
    count, plan = begun.plan.layout.num_devices, begun.plan.to_json()
    single = count == 1
    answers: list[Any] = (
        [run_rank(plan, str(run.folder))]
        if single
        else ranks.run(count, run_rank, plan, str(run.folder), timeout_s=600)
    )
    read: Rows = {}
    for _, seen in answers:
        for step, parts in seen.items():
            for rank, rows in parts.items():
                assert read.setdefault(step, {}).setdefault(rank, rows) == rows, "ranks of tp and pp read the same"
    return answers[0][0], {step: [row for rank in sorted(parts) for row in parts[rank]] for step, parts in read.items()}


def losses(run: Run) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in read_gauges(run.gauges)}


@pytest.mark.parametrize(
    ("experts", "layouts"),
    [
        (False, FEW),
        pytest.param(False, MORE, marks=pytest.mark.slow),
        pytest.param(True, WITH_EXPERTS, marks=pytest.mark.slow),
    ],
    ids=["few", "more", "experts"],
)
def test_saved_on_four_ranks_and_resumed_elsewhere(
    experts: bool, layouts: dict[str, list[str]], recipe: Make, home: Home, ranks: Ranks, tmp_path: Path
) -> None:
    common = [f"train.steps={STEPS}", f"train.save_every={SAVED}", "train.keep=0", "train.eval_every=0"]
    table = decided(recipe(*MIXTRAL, "model.num_layers=2"), home, tmp_path / "model") if experts else recipe().model

    def begin(layout: Sequence[str]) -> ResolvedRun:
        made = replace(recipe(*common, *layout), model=table)
        begun = resolve_run(made, home, model_source(made, home), cpu_ranks=8)
        begun.prepare()
        return begun

    saved = begin(FOUR)
    _, expected = trained(saved, whole := saved.create_run(), ranks)
    assert all(len(expected[step]) == 8 and expected[step] != expected[0] for step in range(1, STEPS))
    for name, layout in layouts.items():
        run = (begun := begin(layout)).create_run()
        shutil.copytree(whole.checkpoint(SAVED), run.checkpoint(SAVED))
        resumed, rows = trained(begun, run, ranks)
        assert resumed == SAVED, name
        assert {step: sorted(rows[step]) for step in rows} == {
            step: sorted(expected[step]) for step in range(SAVED, STEPS)
        }, name
        found, wanted = losses(run), losses(whole)
        assert [found[step] for step in range(SAVED, STEPS)] == pytest.approx(
            [wanted[step] for step in range(SAVED, STEPS)], rel=1e-6
        ), name
