"""Recipes: read, overridden, refused with the nearest name, written back."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.errors import BadInput, BadRecipe, NotFound
from armillary.spec.layout import Layout
from armillary.spec.model import LayerKind, ModelConfig
from armillary.spec.recipe import (
    Recipe,
    check_recipe,
    load_recipe,
    parse_set,
    recipe_from_dict,
    to_dict,
    to_toml,
)
from armillary.spec.tables.train import TrainJob
from armillary.spec.toml import toml_files as toml_text

TOUR = """
[model]
name = "armillary-25m"

[hardware]
on = "here"

[layout]
dp = 2
precision = "auto"

[train]
sequence = 512
batch_tokens = 32_768
steps = 200

[serve]
max_model_len = 1024

[traffic]
requests_per_s = 4.0
tokens_in = 128

[objective]
ttft_p99_s = 0.5
"""


@pytest.fixture
def tour(tmp_path: Path) -> Path:
    path = tmp_path / "tour.toml"
    path.write_text(TOUR)
    return path


def shape(**changes: Any) -> ModelConfig:
    base: dict[str, Any] = {"hidden": 64, "heads": 4, "kv_heads": 4, "head_dim": 16, "ffn": 128, "vocab": 512}
    return ModelConfig(**(base | {"context": 1024, "layers": (LayerKind(),) * 2} | changes))


def refusal(values: dict[str, Any], *overrides: str) -> str:
    with pytest.raises(BadInput) as caught:
        recipe_from_dict(values, overrides)
    return str(caught.value)


MODEL = {"model": {"name": "armillary-25m"}}


def test_a_file_becomes_tables_with_defaults(tour: Path) -> None:
    recipe = load_recipe(tour)
    assert recipe.model.source == "armillary-25m" and recipe.hardware.is_here
    assert recipe.layout == Layout(dp=2) and recipe.train.steps == 200
    assert recipe.traffic.tokens_out == 128 and recipe.cost.usd_per_device_hour is None


def test_overrides_win(tour: Path) -> None:
    recipe = load_recipe(tour, ["layout.tp=2", "train.steps=10", "train.batch_tokens=16M", "layout.zero=3"])
    assert (recipe.layout.tp, recipe.layout.dp, recipe.layout.zero) == (2, 2, 3)
    assert (recipe.train.steps, recipe.train.batch_tokens) == (10, 16_000_000)


def test_an_override_may_add_a_table_or_repair_one() -> None:
    assert recipe_from_dict(MODEL, ["cost.spot=true"]).cost.spot
    assert recipe_from_dict(MODEL | {"layout": {"tp": 0}}, ["layout.tp=2"]).layout.tp == 2


def test_an_override_replaces_what_it_excludes() -> None:
    assert recipe_from_dict(MODEL, ["model.path=there"]).model.source == "there"
    tiers = {"chip": "h100-sxm", "tiers": [{"link": "nvlink4", "count": 8}]}
    assert recipe_from_dict(MODEL | {"hardware": tiers}, ["hardware.on=here"]).hardware.is_here
    assert recipe_from_dict(MODEL | {"hardware": {"on": "h100x8"}}, ["hardware.chip=h100-sxm"]).hardware.on == "here"


def test_lists_of_tables_are_toml_on_the_command_line() -> None:
    sets = ["hardware.chip=h100-sxm", 'hardware.tiers=[{link="nvlink4", count=8}, {link="ndr", count=4}]']
    assert [tier.count for tier in recipe_from_dict(MODEL, sets).hardware.tiers] == [8, 4]


def test_parse_set() -> None:
    assert parse_set("layout.tp=2") == (("layout", "tp"), "2")
    assert parse_set("model.moe.top_k = 4") == (("model", "moe", "top_k"), "4")
    assert parse_set("data.source=a=b.txt") == (("data", "source"), "a=b.txt")


@pytest.mark.parametrize("text", ["tp=2", "layout.tp", "layout.=2", "=2", ""])
def test_a_set_that_cannot_be_read(text: str) -> None:
    with pytest.raises(BadRecipe, match=r"cannot read --set .*; write it like --set layout\.tp=2"):
        parse_set(text)


def test_unknown_names_are_refused_with_the_nearest() -> None:
    assert refusal({"modle": {"name": "x"}}) == "unknown table [modle]; did you mean [model]?"
    assert refusal(MODEL | {"layout": {"tpp": 2}}) == "unknown key 'tpp' in layout; did you mean tp?"
    assert refusal(MODEL, "layuot.tp=2") == "unknown table [layuot]; did you mean [layout]?"
    assert refusal(MODEL, "train.batch_token=2") == "unknown key 'batch_token' in train; did you mean batch_tokens?"
    assert refusal(MODEL, "layout.precision=bf17").startswith("layout.precision=bf17 is not known; did you mean bf16?")


def test_wrong_values_say_what_is_wanted() -> None:
    assert refusal(MODEL, "layout.tp=two") == "layout.tp='two' is not a whole number; write one like 8 or 16M"
    assert "is not a whole number" in refusal(MODEL | {"layout": {"tp": float("inf")}})
    assert "is not a whole number" in refusal(MODEL, "train.steps=1e999")
    assert refusal({"model": "x"}) == "model = 'x' stands alone; write it as a table: [model]"
    assert "needs either a name or a path" in refusal({})
    assert "needs either a name or a path" in refusal({"model": {"name": "a", "path": "b"}})
    assert "link" in refusal(MODEL | {"hardware": {"chip": "h100-sxm", "tiers": [{"count": 8}]}})


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ('[model]\nname = "x"\nsteps 3\n', 3, "expected '='"),
        ("[model\n", 1, "expected ']'"),
        ('[model]\nname = "x', 2, "unterminated string"),
        ('[model]\nname = "x"\nname = "y"\n', 3, "overwrite"),
    ],
)
def test_broken_toml_gives_file_and_line(tmp_path: Path, text: str, line: int, words: str) -> None:
    path = tmp_path / "broken.toml"
    path.write_text(text)
    with pytest.raises(BadRecipe) as caught:
        load_recipe(path)
    sentence = str(caught.value)
    assert sentence.startswith(f"{path}:{line}: not valid TOML: ") and words in sentence and "\n" not in sentence


def test_files_that_are_not_there_or_not_text(tour: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"did you mean .*tour\.toml\?"):
        load_recipe(tmp_path / "tuor.toml")
    with pytest.raises(NotFound, match="is a folder"):
        load_recipe(tmp_path)
    with pytest.raises(NotFound, match="no recipe"):
        load_recipe(tour / "inside.toml")
    (tmp_path / "latin.toml").write_bytes(b'name = "\xe9"')
    with pytest.raises(BadRecipe, match="UTF-8"):
        load_recipe(tmp_path / "latin.toml")


# --- there and back


def test_a_recipe_is_written_short_and_read_back_the_same(tour: Path, tmp_path: Path) -> None:
    recipe = load_recipe(tour, ["model.num_layers=4", "model.moe.top_k=2", "model.window=none", "layout.shard=none"])
    text = to_toml(recipe)
    assert "precision" not in text  # a default
    (tmp_path / "again.toml").write_text(text)
    assert load_recipe(tmp_path / "again.toml") == recipe
    assert recipe_from_dict(to_dict(recipe)) == recipe


RECIPES = st.builds(
    lambda layout, train, model, tiers: recipe_from_dict(
        {
            "model": {"name": "x"} | model,
            "hardware": {"chip": "h100-sxm", "tiers": tiers},
            "layout": layout,
            "train": train,
        }
    ),
    st.fixed_dictionaries(
        {}, optional={"dp": st.integers(1, 99), "zero": st.integers(0, 3), "shard": st.integers(1, 9)}
    ),
    st.fixed_dictionaries(
        {}, optional={"lr": st.floats(1e-9, 1), "steps": st.integers(1, 10**9), "compile": st.booleans()}
    ),
    st.fixed_dictionaries(
        {},
        optional={
            "num_layers": st.integers(1, 99),
            "attention_pattern": st.lists(st.sampled_from(["full", "sliding"]), min_size=1),
            "rope": st.fixed_dictionaries({}, optional={"theta": st.floats(1, 1e9), "original_context": st.none()}),
            "family": st.text(),
        },
    ),
    st.lists(st.fixed_dictionaries({"link": st.text(), "count": st.integers(1, 64)})),
)


@settings(deadline=None)
@given(RECIPES)
def test_any_recipe_survives_toml(recipe: Recipe) -> None:
    assert recipe_from_dict(tomllib.loads(to_toml(recipe))) == recipe


PLAIN = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=5,
)
TABLES = st.recursive(
    st.dictionaries(st.text(), PLAIN, max_size=4),
    lambda inner: st.dictionaries(st.text(), inner | PLAIN, max_size=3),
    max_leaves=6,
)


@settings(deadline=None)
@given(TABLES)
def test_toml_text_is_what_tomllib_reads(tables: dict[str, Any]) -> None:
    assert tomllib.loads(toml_text.dumps(tables)) == tables


# --- what tables must agree on


def test_lengths_beyond_the_context_are_refused() -> None:
    def check(*overrides: str, **how: Any) -> str:
        with pytest.raises(BadRecipe) as caught:
            check_recipe(recipe_from_dict(MODEL, overrides), shape(name="tiny"), **how)
        return str(caught.value)

    assert check("train.sequence=2048") == (
        "train.sequence=2048 is longer than the context of tiny; try --set train.sequence=1024"
    )
    assert check("data.vocab=1000").endswith("try --set data.vocab=512")
    assert check("serve.max_model_len=2048", for_training=False).endswith("try --set serve.max_model_len=1024")
    check_recipe(recipe_from_dict(MODEL, ["train.sequence=1024"]), shape())
    check_recipe(recipe_from_dict(MODEL, ["train.sequence=2048"]), shape(), for_training=False)


def test_the_model_is_the_catalogue_s_unless_handed_in() -> None:
    recipe = recipe_from_dict({"model": {"name": "llama-3-8b", "num_layers": 2}})
    assert recipe.model_config().num_layers == 2 and recipe.model_config().hidden == 4096
    assert recipe.model_config(shape()).hidden == 64
    with pytest.raises(NotFound, match="did you mean llama-3-8b"):
        recipe_from_dict({"model": {"name": "lama-3-8b"}}).model_config()


def test_a_job_is_its_table() -> None:
    assert recipe_from_dict(MODEL).train == TrainJob()


def test_the_file_of_a_service_is_a_recipe() -> None:
    """[gateway] is for `armillary up` alone; plans and reports read the rest."""
    recipe = load_recipe(Path(__file__).parents[2] / "recipes" / "service.toml", ["traffic.requests_per_s=9"])
    assert recipe.fleet.replicas == 1 and recipe.traffic.requests_per_s == 9
