"""`armillary import`: from another trainer's file to a recipe that can be planned."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.spec.imported.test_read_config import DEEPSPEED

Cli = Callable[..., Any]


def test_an_imported_recipe_can_be_planned(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(DEEPSPEED))
    recipe = tmp_path / "recipe.toml"
    asked = ("import", str(tmp_path / "ds.json"), "--model", "llama-3-8b", "--on", "h100x8", "--out", str(recipe))
    answer = cli(*asked, "--json").json
    assert answer["recipe"]["layout"]["zero"] == 2
    assert "wall_clock_breakdown" in [row["theirs"] for row in answer["left_out"]]
    assert "wall_clock_breakdown" in recipe.read_text()
    assert cli("plan", str(recipe), "--json").json["plan"]["layout"]["dp"] == 8
    refused = cli(*asked)
    assert refused.code == 2 and "already there" in refused.err


def test_a_file_that_is_not_there(cli: Cli, tmp_path: Path) -> None:
    assert f"no file {tmp_path / 'no.json'}" in cli("import", str(tmp_path / "no.json")).err


def test_a_file_with_no_key_that_is_known_says_so(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "empty.json").write_text("{}")
    answer = cli("import", str(tmp_path / "empty.json"), "--model", "llama-3-8b")
    assert answer.code == 0 and "has no key of" in answer.err
