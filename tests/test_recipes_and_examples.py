"""What we ship to be copied works: every recipe passes the trainer's checks, every example runs."""

from __future__ import annotations

import os
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


EXAMPLES = {
    "python_api": ((), ("loss", "converted to half")),
    "resnet50_profile": (("--quick",), ("ResNet-50 on cpu", "1. aten::", "memory peak")),
}
"""example -> its arguments, and what it must print"""


def test_every_example_is_tried() -> None:
    found = {path.stem for path in (ROOT / "examples").glob("*.py") if "__main__" in path.read_text()}
    assert found == set(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs(name: str) -> None:
    arguments, printed = EXAMPLES[name]
    line = [sys.executable, ROOT / "examples" / f"{name}.py", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(line, capture_output=True, text=True, timeout=300, cwd=ROOT, env=environment)
    assert ran.returncode == 0, ran.stderr
    assert all(text in ran.stdout for text in printed), ran.stdout
