"""A lever applied: the recipe that was given, with its comments, and one key changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from armillary.diagnosis.evidence.finding import Lever
from armillary.diagnosis.levers.apply import changed_recipe, with_key
from armillary.errors import BadInput
from armillary.spec.recipe import load_recipe, recipe_from_dict, to_dict
from armillary.store.home import Home
from armillary.store.runs import create_run

TEXT = """# my recipe
[model]
name = "armillary-5m"   # small

[layout]
micro_batch = 1   # one at a time

[train]
sequence = 128
"""


def lever(**change: object) -> Lever:
    return Lever(title="x", change={key.replace("__", "."): value for key, value in change.items()}, speedup=1.2)


@pytest.mark.parametrize("text", [TEXT, ""])
def test_the_changed_recipe_is_the_old_one_with_the_lever(tmp_path: Path, text: str) -> None:
    recipe = recipe_from_dict({"model": {"name": "armillary-5m"}, "train": {"sequence": 128}}, ["train.steps=7"])
    run = create_run(Home.at(tmp_path), to_dict(recipe), text=text, overrides=["train.steps=7"])
    made = changed_recipe(run, lever(layout__micro_batch=4, train__compile=True, data__workers=2))
    path = tmp_path / "new.toml"
    path.write_text(made)
    wanted = recipe_from_dict(
        {
            "model": {"name": "armillary-5m"},
            "train": {"sequence": 128, "steps": 7, "compile": True},
            "layout": {"micro_batch": 4},
            "data": {"workers": 2},
        }
    )
    assert load_recipe(path) == wanted
    assert ("# my recipe" in made) is bool(text) and ("micro_batch = 4   # one at a time" in made) is bool(text)


def test_a_text_that_editing_cannot_follow_is_written_anew(tmp_path: Path) -> None:
    inline = 'layout = {micro_batch = 1}\n[model]\nname = "armillary-5m"\n'
    run = create_run(Home.at(tmp_path), {"model": {"name": "armillary-5m"}}, text=inline)
    path = tmp_path / "new.toml"
    path.write_text(changed_recipe(run, lever(layout__micro_batch=4)))
    assert load_recipe(path).layout.micro_batch == 4


def test_keys_are_set_where_they_belong() -> None:
    assert with_key("[a]\nx = 1\n\n[b]\nx = 2\n", "b.x", "3") == "[a]\nx = 1\n\n[b]\nx = 3\n"
    assert with_key("[a]\nx = 1\n\n[b]\ny = 2\n", "a.y", "none") == '[a]\nx = 1\ny = "none"\n\n[b]\ny = 2\n'
    assert with_key("", "a.y", "true") == "[a]\ny = true\n"
    assert with_key("layout = {micro_batch = 1}\n", "layout.micro_batch", "4") == "layout = {micro_batch = 4}\n"


def test_what_no_key_does_cannot_be_written(tmp_path: Path) -> None:
    run = create_run(Home.at(tmp_path), {"model": {"name": "armillary-5m"}})
    with pytest.raises(BadInput, match="'look' changes no key of the recipe; replace the machine"):
        changed_recipe(run, Lever(title="look", action="replace the machine", speedup=1.3))


def test_of_a_server_the_text_stays_though_model_and_layout_came_by_flags(tmp_path: Path) -> None:
    text = '[model]\nname = "armillary-5m"\n\n[train]\nsteps = 9\n\n[serve]\nmax_running = 2   # too few\n'
    served = {"model": {"path": "/somewhere"}, "layout": {"tp": 2}, "serve": {"max_running": 2}}
    run = create_run(Home.at(tmp_path), served, text=text)
    made = changed_recipe(run, lever(serve__max_running=8), "serving")
    assert made == text.replace("max_running = 2 ", "max_running = 8 ")
    run = create_run(Home.at(tmp_path), served | {"serve": {"max_running": 2, "weights": "fp8"}}, text=text)
    (tmp_path / "new.toml").write_text(changed_recipe(run, lever(serve__max_running=8), "serving"))
    assert load_recipe(tmp_path / "new.toml").serve.weights == "fp8", "by a flag, so the text alone is not enough"


def test_what_a_server_does_not_read_is_not_written(tmp_path: Path) -> None:
    run = create_run(Home.at(tmp_path), {"model": {"path": "/somewhere"}})
    with pytest.raises(BadInput, match=r"'x' changes layout.dp, which armillary serve does not read; do it by hand"):
        changed_recipe(run, lever(layout__dp=2, serve__max_running=8), "serving")
