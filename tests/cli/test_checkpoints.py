"""The checkpoints of a run from the command line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from armillary.parallel.consensus import Consensus
from armillary.spec.recipe import recipe_from_dict, to_dict
from armillary.store.home import Home
from armillary.store.runs import Run, create_run
from armillary.training.checkpoint.checkpoint import save

Cli = Callable[..., Any]
ALONE = Consensus(rank=0, size=1)


@pytest.fixture
def run(home: Home) -> Run:
    recipe = recipe_from_dict({"model": {"name": "armillary-2m"}, "train": {"keep": 2}})
    run = create_run(home, to_dict(recipe), name="tried")
    for step in (2, 4, 6):
        tensors = {"model.w": torch.full((4, 4), float(step)), "model.same": torch.ones(3)}
        save(run, step, tensors, {"loss": 1.0 / step, "val_loss": 3.0, "kernels": {}}, ALONE)
    run.update(state="interrupted")
    return run


def answer(cli: Cli, *arguments: str) -> Any:
    ran = cli("checkpoints", *arguments, "--json")
    assert ran.code == 0, ran.err
    return ran.json


def test_ls_says_what_is_there_and_why(cli: Cli, run: Run) -> None:
    rows = answer(cli, "ls", "tried")
    assert [(row["step"], row["kind"], row["state"], row["kept as"]) for row in rows] == [
        (2, "full", "complete", ""),
        (4, "full", "complete", "last"),
        (6, "full", "complete", "last"),
    ]
    assert "kept as" in cli("checkpoints", "ls").out, "the newest run where none is named"


def test_show(cli: Cli, run: Run) -> None:
    about = answer(cli, "show", "tried", "4")
    assert about["step"] == 4 and about["facts"]["loss"] == 0.25
    assert about["tensors"]["model.w"] == {"shape": [4, 4], "dtype": "torch.float32"}
    done = cli("checkpoints", "show", "tried", "5")
    assert done.code == 2 and "has no checkpoint 5; it has 2, 4, 6" in done.err


def test_verify_names_the_damaged_one(cli: Cli, run: Run) -> None:
    assert answer(cli, "verify", "tried") == {"2": [], "4": [], "6": []}
    path = run.checkpoint(4) / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[800] ^= 1
    path.write_bytes(content)
    done = cli("checkpoints", "verify", "tried")
    assert done.code == 2 and "1 of 3 checkpoints of run tried are damaged" in done.err
    assert "4: the content of __0_0.distcp has changed" in done.out


def test_prune(cli: Cli, run: Run) -> None:
    assert answer(cli, "prune", "tried", "--dry-run")["deleted"] == [2] and run.checkpoint_steps() == [2, 4, 6]
    assert answer(cli, "prune", "tried", "--keep", "1", "--every", "4")["deleted"] == [2]
    assert run.checkpoint_steps() == [4, 6]


def test_diff(cli: Cli, run: Run) -> None:
    found = answer(cli, "diff", "tried", "2", "4")
    assert found["tensors"]["model.w"]["relative"] == pytest.approx(1.0) and found["tensors"]["model.w"]["largest"] == 2
    assert found["tensors"]["model.same"]["relative"] == 0.0
    assert found["facts"]["loss"] == [0.5, 0.25]
    assert "1 of 2 tensors differ" in cli("checkpoints", "diff", "tried", "2", "4").out
