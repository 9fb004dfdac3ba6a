"""Ranks whose launcher is gone, and with it the store that they met in: they stop, and save."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed import distributed_c10d

from armillary.spec.plan import Plan
from armillary.spec.recipe import Recipe
from armillary.store.home import Home
from armillary.store.runs import Run
from armillary.training.loop import train
from armillary.training.prepare_run import model_source, resolve_run
from armillary.training.trainer import Trainer
from tests.ranks import Ranks


class GoneStore:
    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        def fail(*_: Any) -> NoReturn:
            raise dist.DistNetworkError("connection reset by peer")

        return fail


def lose_the_store(plan: str, folder: str) -> tuple[int, int | None, bool]:
    """Train; from step 3 on the store is gone, and the ranks are asked to stop."""
    original, default_store = Trainer.step, distributed_c10d._get_default_store

    def step(self: Trainer, number: int, **more: Any) -> Any:
        if number >= 3:
            distributed_c10d._get_default_store = GoneStore
            more["stop"] = lambda: True
        return original(self, number, **more)

    Trainer.step = step  # type: ignore[method-assign, assignment]
    try:
        done = train(Plan.from_json(plan), Run(folder=Path(folder)))
    finally:
        Trainer.step, distributed_c10d._get_default_store = original, default_store  # type: ignore[method-assign]
    return done.steps, done.saved, done.finished


def test_ranks_without_their_launcher_save_before_they_end(
    recipe: Callable[..., Recipe], home: Home, ranks: Ranks
) -> None:
    asked = recipe("train.steps=20", "train.eval_every=0", "train.save_every=0", "layout.dp=2")
    begun = resolve_run(asked, home, model_source(asked, home), cpu_ranks=2)
    begun.prepare()
    run = begun.create_run()
    ((steps, saved, finished), other) = ranks.run(2, lose_the_store, begun.plan.to_json(), str(run.folder))
    assert (steps, saved, finished) == other and steps == saved == run.checkpoint_steps()[-1] and not finished
    assert 3 <= steps <= 5 and run.state.state == "interrupted"
