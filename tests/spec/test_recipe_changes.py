"""Every key of a recipe says what editing it means for a run that is resumed, and differences come with that class."""

from __future__ import annotations

import dataclasses

import pytest

from armillary.spec.recipe import TABLES, KeyChange, Recipe, class_of, recipe_changes, recipe_from_dict
from armillary.spec.tables.resume_class import classes_of

KEYS = [f"{table}.{field.name}" for table, cls in TABLES.items() for field in dataclasses.fields(cls)]


@pytest.mark.parametrize("key", KEYS)
def test_every_key_has_one_class(key: str) -> None:
    table, _, name = key.partition(".")
    whole, own = classes_of(Recipe)[table], classes_of(TABLES[table]).get(name)
    assert (whole is None) != (own is None), "said of the table or of the key, once"
    assert class_of(key) in ("free", "noted", "defining")


def test_the_classes_that_were_promised() -> None:
    free = (
        "train.save_every",
        "train.log_every",
        "serve.max_running",
        "cost.spot",
        "traffic.tokens_in",
        "load.api",
        "data.workers",
        "train.until",
    )
    noted = ("train.lr", "train.steps", "layout.precision", "layout.dp", "hardware.on", "train.weight_decay")
    defining = (
        "model.name",
        "model.ffn",
        "model.rope.theta",
        "data.source",
        "data.blend.x",
        "data.seed",
        "train.seed",
        "train.batch_tokens",
        "train.sequence",
        "train.lora_rank",
    )
    for kind, keys in (("free", free), ("noted", noted), ("defining", defining)):
        assert {key: class_of(key) for key in keys} == dict.fromkeys(keys, kind)


def test_differences_have_class_and_both_values() -> None:
    before = recipe_from_dict({"model": {"name": "armillary-2m"}, "train": {"steps": 1000}})
    now = recipe_from_dict({"model": {"name": "armillary-2m", "ffn": 96}, "train": {"lr": 0.1, "save_every": 5}})
    found = {change.key: change for change in recipe_changes(before, now)}
    assert found["train.lr"] == KeyChange(key="train.lr", kind="noted", before=None, now=0.1)
    assert found["train.lr"].text == "train.lr none → 0.1"
    assert {key: change.kind for key, change in found.items()} == {
        "model.ffn": "defining",
        "train.lr": "noted",
        "train.save_every": "free",
    }
    assert recipe_changes(now, now) == []
