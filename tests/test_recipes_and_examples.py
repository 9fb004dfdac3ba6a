"""What we ship to be copied works: every recipe passes the trainer's checks, every example runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from armillary.cli import demo
from armillary.spec.recipe import load_recipe
from armillary.store.home import Home
from armillary.training.start import start, starting_point

ROOT = Path(__file__).parent.parent
RECIPES = [*sorted((ROOT / "recipes").glob("*.toml")), Path(demo.__file__).parent / "demo.toml"]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_can_be_started_and_exported(path: Path, home: Home) -> None:
    recipe = load_recipe(path)
    if recipe.model.path:  # needs a folder of one's own; a shape stands in for it
        recipe = load_recipe(path, ["model.name=armillary-2m"])
    assert start(recipe, home, starting_point(recipe, home)).plan.model.name


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_an_example_runs(path: Path) -> None:
    ran = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr
    assert "loss" in ran.stdout and "converted to half" in ran.stdout
