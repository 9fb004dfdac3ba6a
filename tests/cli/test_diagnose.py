"""armillary diagnose: the verdict as people and programs read it, levers applied, runs compared."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from armillary.diagnosis.diagnosis import read_diagnosis
from armillary.spec.recipe import load_recipe
from armillary.store.home import Home
from tests.diagnosis.trained import plan_of, run_of

Cli = Callable[..., Any]


@pytest.fixture(autouse=True)
def two_runs(home: Home) -> None:
    run_of(home, plan_of(), name="quiet-otter", data_wait_s=0.5)
    run_of(home, plan_of("data.workers=3"), name="bold-heron", step_s=0.55)


def test_the_verdict_in_words(cli: Cli, home: Home) -> None:
    said = cli("diagnose", "quiet-otter").out
    assert said.startswith("inner loop limits this run · every step waits 500 ms of 1 s for its batch")
    assert "  evidence    data wait 50%" in said
    assert "loader workers 0 → 3" in said and "predicted 2.00 ×" in said and "--set data.workers=3" in said
    assert said.rstrip().endswith("apply: armillary diagnose quiet-otter --apply 1")
    assert read_diagnosis(next(home.runs.glob("*quiet-otter"))).cause == "data_starvation"


def test_the_verdict_for_programs(cli: Cli) -> None:
    answer = cli("diagnose", "quiet-otter", "--json").json
    assert (answer["loop"], answer["cause"]) == ("inner", "data_starvation")
    assert answer["levers"][0]["change"] == {"data.workers": 3}
    assert cli("diagnose", "quiet-otter", "--quiet").out == "inner data_starvation\n"
    assert cli("diagnose", "bold-heron", "--quiet").out == "healthy\n"


def test_a_lever_is_applied_and_held_to_its_word(cli: Cli, tmp_path: Path) -> None:
    said = cli("diagnose", "quiet-otter", "--apply", "1", "--to", str(tmp_path / "next.toml")).out
    assert "predicted 2.00 ×" in said and "armillary diagnose compare quiet-otter" in said
    assert load_recipe(tmp_path / "next.toml").data.workers == 3
    said = cli("diagnose", "compare", "quiet-otter", "bold-heron").out
    assert "step 1 s → 550 ms   obtained 1.82 ×   predicted 2.00 ×   (track record: 1 lever, median error 9%)" in said
    assert "changed: data.workers=3" in said
    said = cli("diagnose", "--track-record").out
    assert "loader workers 0 → 3" in said and "1 lever, median error 9%" in said
    kept = cli("diagnose", "--track-record", "--json").json
    assert kept["levers"][0]["obtained"] == pytest.approx(1 / 0.55)
    assert kept["median_error"] == pytest.approx(1 - 1 / 1.1)


@pytest.mark.parametrize(
    ("words", "line"),
    [(["quiet-oter"], "no run 'quiet-oter'; did you mean quiet-otter?"),
     (["no/such.json"], "no file or run 'no/such.json'; give a run, gauges.jsonl, a trace, a log or a URL"),
     (["quiet-otter", "--apply", "9"], "no lever 9; levers are 1 to"),
     (["quiet-otter", "--to", "x.toml"], "--to x.toml says where a changed recipe goes; add --apply N")],
)  # fmt: skip
def test_bad_input_is_one_line(cli: Cli, words: list[str], line: str) -> None:
    ran = cli("diagnose", *words)
    assert ran.code == 2 and line in ran.err and "Traceback" not in ran.err
