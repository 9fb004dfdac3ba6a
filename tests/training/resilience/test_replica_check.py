"""Replicas that should be equal: a flipped bit is found and its rank named; sharded tensors are not compared."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from armillary.errors import ArmillaryError
from armillary.spec.plan import Plan
from armillary.spec.recipe import Recipe
from armillary.store.home import Home
from armillary.store.runs import Run
from armillary.training.loop import train
from armillary.training.prepare_run import model_source, resolve_run
from armillary.training.resilience.replica_check import bit_sums, differing_ranks
from armillary.training.trainer import Trainer
from tests.ranks import Ranks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
def test_one_flipped_bit_changes_the_sum(dtype: torch.dtype) -> None:
    value = (torch.randn(33, generator=torch.Generator().manual_seed(0)) * 9).to(dtype)
    before = bit_sums({"a": value})
    flipped = value.clone()
    bits = flipped.view(torch.uint8)
    bits[17] ^= 1 << 5
    assert bit_sums({"a": value.clone()}) == before != bit_sums({"a": flipped})


def test_the_rank_that_differs_from_most_is_named() -> None:
    assert differing_ranks([{"w@": 1}, {"w@": 1}, {"w@": 2}, {"w@": 1}]) == {"w@": [2]}
    assert differing_ranks([{"w@": 1}, {"w@": 2}]) == {"w@": [0, 1]}, "of two, nobody knows which"
    assert differing_ranks([{"w@0": 1}, {"w@4": 2}]) == {}, "other parts of one tensor"


def flip_a_bit(plan: str, folder: str, rank: int) -> str:
    """Train; one rank's weights get a flipped bit in step 3."""
    original = Trainer.optimizer_step

    def flipping(self: Trainer, step: int, *args: object) -> None:
        original(self, step, *args)  # type: ignore[arg-type]
        if step == 3 and self.world.rank == rank:
            parameter = next(p for p in self.model.parameters() if p.ndim == 2).data
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            local.view(torch.int32).view(-1)[5] ^= 1

    Trainer.optimizer_step = flipping  # type: ignore[method-assign]
    try:
        done = train(Plan.from_json(plan), Run(folder=Path(folder)))
    except ArmillaryError as error:
        return str(error)
    finally:
        Trainer.optimizer_step = original  # type: ignore[method-assign]
    return f"finished {done.finished}"


@pytest.mark.parametrize(
    ("layout", "rank", "says", "kept"),
    [
        (["layout.dp=2", "train.replica_check_every=2"], 1, "the run starts from the beginning", []),
        (["layout.dp=2", "train.save_every=2"], 1, "the run continues from checkpoint 2", [2]),
        (["layout.dp=2", "layout.zero=1", "train.replica_check_every=2"], -1, "finished True", [6]),
        (["layout.tp=2", "train.replica_check_every=2"], -1, "finished True", [6]),
    ],
    ids=["flipped", "flipped before a checkpoint", "healthy zero-1", "healthy tp"],
)
def test_a_flipped_bit_ends_the_run_and_is_never_saved(
    layout: list[str], rank: int, says: str, kept: list[int], recipe: Callable[..., Recipe], home: Home, ranks: Ranks
) -> None:
    asked = recipe("train.steps=6", "train.eval_every=0", "train.save_every=0", *layout)
    begun = resolve_run(asked, home, model_source(asked, home), cpu_ranks=2)
    begun.prepare()
    run = begun.create_run()
    answers = ranks.run(2, flip_a_bit, begun.plan.to_json(), str(run.folder), rank)
    assert len(set(answers)) == 1 and answers[0].endswith(says) and run.checkpoint_steps() == kept
    assert rank < 0 or (answers[0].startswith("after step 4 ") and "of ranks 0, 1 differs" in answers[0])
