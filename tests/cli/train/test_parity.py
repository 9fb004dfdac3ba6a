"""`armillary parity`: what runs, what is said of it, and when it fails."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from armillary.cli.train import parity
from armillary.training.parity.matrix import Row, rows_of
from tests.conftest import Ran

Cli = Callable[..., Ran]
GOOD = {"loss": 1e-7, "norm": 1e-7, "weights": 1e-6}


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """`task = found(row, …)`: the ranks find these rows; what they were told is kept."""

    def launch(*rows: Row) -> list[dict[str, Any]]:
        told: list[dict[str, Any]] = []
        monkeypatch.setattr(parity, "_launched", lambda out, home, task: told.append(task) or list(rows))
        return told

    return launch


def test_rows_go_to_a_page_and_all_hold(cli: Cli, found: Callable[..., Any], tmp_path: Path) -> None:
    told = found(Row("DDP", 2, 4, {"fp32": GOOD}), Row("tp", 2, 4, {"fp32": GOOD}))
    page = tmp_path / "page.md"
    ran = cli("parity", "ddp", "tp", "fp32", str(page))
    assert ran.code == 0 and "all 2 hold" in ran.out
    assert told == [{"world": 2, "strategies": ["DDP", "tp"], "formats": ["fp32"]}]
    assert [row.strategy for row in rows_of(page.read_text())] == ["DDP", "tp"]


def test_a_row_beyond_its_bar_is_named_and_ends_with_one(cli: Cli, found: Callable[..., Any], tmp_path: Path) -> None:
    found(Row("DDP", 4, 4, {"fp32": GOOD}), Row("tp", 4, 4, {"fp32": GOOD | {"weights": 2e-5}}))
    line = ("parity", "--devices", "4", str(tmp_path / "page.md"))
    ran = cli(*line)
    assert ran.code == 1 and "tp on 4 ranks does not hold: weights fp32 2.0e-05 > 1e-05" in ran.out
    answer = json.loads(cli(*line, "--json").out)
    assert not answer["holds"] and [row["holds"] for row in answer["rows"]] == [True, False]


def test_the_layout_of_a_recipe_is_a_row(cli: Cli, found: Callable[..., Any], tmp_path: Path) -> None:
    told = found(Row("recipe: dp=2 × pp=2", 4, 7, {"fp32": GOOD}))
    recipe = tmp_path / "r.toml"
    recipe.write_text('[model]\nname = "armillary-2m"\n[layout]\npp = 2\ndp = 2\nzero = 1\n')
    assert cli("parity", str(recipe)).code == 0
    assert told[0]["world"] == 4 and told[0]["layout"]["zero"] == 1
    experts = ["--set", "model.moe.num_experts=8", "--set", "model.moe.top_k=2", "--set", "model.moe.ffn=64"]
    assert cli("parity", str(recipe), "--set", "layout.ep=2", *experts).code == 0
    assert told[1]["experts"] and not told[0]["experts"], "the recipe's own shape counts"
    ran = cli("parity", str(recipe), "--set", "layout.tp=3", "--set", "layout.dp=1")
    assert ran.code == 2 and "tp=3 does not divide" in ran.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["parity", "nonsense"], "no strategy 'nonsense'"),
        (["parity", "HSDP"], "HSDP has no use for 2 ranks; try --devices 4"),
        (["parity", "--devices", "1"], "give 2, 4 or 8"),
        (["parity", "a.md", "b.md"], "takes one *.md file"),
        (["parity", "pp", "--set", "layout.pp=2"], "changes a recipe and there is none; add its file"),
        (["train"], "missing argument 'RECIPE'"),
        (["train", "r.toml", "tp"], "unexpected extra argument"),
        (["train", "--parity"], "--parity is no more; try armillary parity"),
        (
            ["train", "r.toml", "--only", "tp"],
            "--only is no more; name strategies and formats, like armillary parity",
        ),
        (["train", "--page", "x.md"], "--page is no more; name the page, like armillary parity docs/page.md"),
        (["train", "r.toml", "--random-weights"], "--random-weights is no more; try --set train.from_scratch=true"),
    ],
)
def test_what_cannot_be_run_is_one_line(cli: Cli, words: list[str], said: str) -> None:
    ran = cli(*words)
    assert ran.code == 2 and said in ran.err


@pytest.mark.slow
def test_ranks_are_started_and_agree(cli: Cli, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    ran = cli("parity", "experts: ep", "ZeRO-1", "fp64", str(page))
    assert ran.code == 0, ran.err
    assert {row.strategy for row in rows_of(page.read_text())} >= {"experts: ep", "ZeRO-1"}
