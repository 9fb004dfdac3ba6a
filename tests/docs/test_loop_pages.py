"""What the pages on loops and the how-tos name exists: gauges, keys of recipes, and whole recipes."""

from __future__ import annotations

import re
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from armillary.spec.gauges import GAUGES
from armillary.spec.recipe import TABLES, recipe_from_dict

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted([*(DOCS / "loops").glob("*.md"), *(DOCS / "howto").glob("*.md")])
LOOPS = sorted((DOCS / "loops").glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_keys_of_recipes_exist(page: Path) -> None:
    named = re.findall(rf"\b({'|'.join(TABLES)})\.(\w+)(?=[ =`])", page.read_text())
    wrong = {f"{table}.{key}" for table, key in named if key not in {each.name for each in fields(TABLES[table])}}
    assert wrong == set()


@pytest.mark.parametrize("page", LOOPS, ids=lambda page: page.stem)
def test_gauges_exist(page: Path) -> None:
    rows = page.read_text().partition("## Gauges")[2].partition("## Levers")[0].splitlines()
    named = [name for row in rows if row.startswith("|") for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert len(named) >= 5 and set(named) - set(GAUGES) == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_recipes_are_read(page: Path) -> None:
    for block in re.findall(r"```toml\n(.*?)```", page.read_text(), re.DOTALL):
        recipe_from_dict({"model": {"name": "llama-3-8b"}} | tomllib.loads(block), [])
