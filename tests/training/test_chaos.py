"""Ranks are killed at random times by a process that knows nothing of the run: nothing is lost, nothing changes.

benchmarks/chaos.py does the same for many rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from armillary.spec.plan import Plan
from armillary.spec.recipe import Recipe, to_toml
from armillary.store.goodput import account_of_run
from armillary.store.home import Home
from armillary.store.runs import Run, find_run
from armillary.training.loop import train
from armillary.training.prepare_run import model_source, resolve_run
from tests.chaos import train_under_fire, weights_digest
from tests.ranks import Ranks

SETTINGS = (
    "layout.dp=4",
    "layout.micro_batch=2",
    "train.steps=150",
    "train.save_every=10",
    "train.eval_every=0",
    "train.max_restarts=20",
)


def train_whole(plan: str, folder: str) -> None:
    train(Plan.from_json(plan), Run(folder=Path(folder)))


@pytest.mark.slow
def test_ranks_killed_at_random_times_end_with_the_same_weights(
    recipe: Callable[..., Recipe], tmp_path: Path, home: Home, ranks: Ranks
) -> None:
    made, path = recipe(*SETTINGS), tmp_path / "recipe.toml"
    path.write_text(to_toml(made))
    begun = resolve_run(made, home, model_source(made, home), cpu_ranks=4)
    begun.prepare()
    ranks.run(4, train_whole, begun.plan.to_json(), str(begun.create_run(name="whole").folder))
    killed = train_under_fire(path, home, "killed", seed=1, kills=2, gap_s=14)
    assert killed.code == 0, killed.err
    assert killed.kills and 1 <= killed.err.count("start again from") <= len(killed.kills), (killed.kills, killed.err)
    assert weights_digest(home, "killed") == weights_digest(home, "whole")
    account = account_of_run(find_run(home, "killed"), now=time.time())
    assert account is not None and account.num_failures == killed.err.count("start again from")
    assert account.share("other") <= 0.01 and account.seconds["idle"] == 0
