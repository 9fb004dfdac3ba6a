"""Instruction tuning from end to end: records in, a model that was taught its answers and carries its template out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from armillary.model.text.tokenizer import Tokenizer
from armillary.spec.recipe import Recipe
from armillary.store.home import Home
from armillary.training.data.batch import IGNORED
from armillary.training.loop import train
from armillary.training.open_data import open_data
from armillary.training.prepare_run import model_source, resolve_run, train_recipe
from tests.ranks import Ranks
from tests.training.test_many_ranks import begin, losses, on_ranks


def talks(tmp_path: Path) -> Path:
    path = tmp_path / "talks.jsonl"
    with path.open("w") as file:
        for i in range(60):
            turns = [("user", f"say {i}"), ("assistant", f"{i} {i}"), ("user", "again"), ("assistant", f"{i}!")]
            file.write(json.dumps({"messages": [{"role": r, "content": c} for r, c in turns]}) + "\n")
    return path


def test_batches_hold_whole_conversations_and_ask_for_answers_only(
    tmp_path: Path, home: Home, recipe: Callable[..., Recipe]
) -> None:
    wanted = recipe(f"data.source={talks(tmp_path)}", "data.format=chat", "train.sequence=96", "train.batch_tokens=384")
    begun = resolve_run(wanted, home, model_source(wanted, home))
    begun.prepare()
    assert begun.plan.data is not None and begun.plan.train is not None
    opened = open_data(begun.plan.data, begun.plan.train)
    tokenizer = Tokenizer.load(opened.tokenizer_folder)
    seen = set()
    for step in range(8):
        batch = opened.train.at(step)
        for tokens, targets, positions, documents in zip(
            batch.tokens_BT, batch.targets_BT, batch.positions_BT, batch.documents_BT, strict=True
        ):
            for number in np.unique(documents):
                here = documents == number
                if (targets[here] == IGNORED).all():
                    continue  # padding
                text = tokenizer.decode(tokens[here].tolist(), skip_special=False)
                assert text.startswith("<|endoftext|><|im_start|>user\nsay ") and positions[here][0] == 0
                name = text.split("say ")[1].split("<")[0]
                learnt = tokenizer.decode(targets[here][targets[here] != IGNORED].tolist(), skip_special=False)
                assert learnt == f"{name} {name}<|im_end|>{name}!<|im_end|>"
                seen.add(name)
    assert len(seen) > 30


def test_cut_conversations_are_said(tmp_path: Path, home: Home, recipe: Callable[..., Recipe]) -> None:
    wanted = recipe(
        f"data.source={talks(tmp_path)}",
        "data.format=chat",
        "train.sequence=32",
        "train.batch_tokens=128",
        "train.steps=1",
        "train.profile_every=0",
    )
    begun = resolve_run(wanted, home, model_source(wanted, home))
    begun.prepare()
    said: list[str] = []
    train(begun.plan, begun.create_run(), device="cpu", say=said.append)
    assert any("conversations" in line and "train.sequence" in line for line in said), said


def test_a_model_learns_to_answer(tmp_path: Path, home: Home, recipe: Callable[..., Recipe]) -> None:
    wanted = recipe(
        f"data.source={talks(tmp_path)}",
        "data.format=chat",
        "train.sequence=96",
        "train.batch_tokens=768",
        "train.steps=8",
        "train.lr=0.01",
        "train.profile_every=0",
    )
    losses: list[float] = []
    done = train_recipe(wanted, home=home, device="cpu", watch=lambda report: losses.append(report.gauges["loss"]))
    assert losses[-1] < losses[0] - 1 and done.val_loss is not None and done.export is not None
    assert Tokenizer.load(done.export).chat([{"role": "user", "content": "x"}]).endswith("<|im_start|>assistant\n")


@pytest.mark.slow
def test_ranks_with_different_numbers_of_targets_train_as_one(
    tmp_path: Path, home: Home, recipe: Callable[..., Recipe], ranks: Ranks
) -> None:
    """Every target counts alike, whichever rank and micro-batch it is in: the mean is over all of them."""
    path = tmp_path / "uneven.jsonl"
    turns = [[("user", f"say {i}"), ("assistant", f"{i} " * (1 + 17 * (i % 2)))] for i in range(60)]
    talks = [{"messages": [{"role": r, "content": c} for r, c in turn]} for turn in turns]
    path.write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    settings = (
        f"data.source={path}",
        "data.format=chat",
        "train.sequence=96",
        "train.batch_tokens=384",
        "train.steps=4",
        "train.lr=0.01",
        "layout.micro_batch=1",
    )
    alone, two = begin(recipe(*settings), home), begin(recipe(*settings, "layout.dp=2"), home)
    assert two.plan.data is not None and two.plan.train is not None
    source = open_data(two.plan.data, two.plan.train).train
    shares = [[source.at(step, rank=rank, world=2).num_targets for rank in (0, 1)] for step in range(4)]
    assert any(first != second for first, second in shares), "or nothing is tested"
    runs = alone.create_run(), two.create_run()
    on_ranks(ranks, alone, runs[0])
    on_ranks(ranks, two, runs[1])
    assert losses(runs[1]) == pytest.approx(losses(runs[0]), rel=1e-6)
