"""Levers that were pulled: what is allowed, and which kinds came out as predicted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import lever_case, levers
from benchmarks.lever_case import LeverCase, Pulled, pull
from benchmarks.levers import CLAIMED, as_page, holds, kept

ONE = Pulled(name="compile", change="--set a=1", of="step_s", predicted=1.5, obtained=1.4, where="cpu")
ROWS = [replace(ONE, name=name, where=where) for name, places in CLAIMED.items() for where in places]


def test_what_is_allowed_grows_with_what_was_promised(tmp_path: Path) -> None:
    assert ONE.within and not replace(ONE, obtained=1.66).within
    assert replace(ONE, predicted=1.01, obtained=1.03).within and not replace(ONE, predicted=1.01, obtained=1.05).within
    ONE.write(tmp_path / "one.json")
    assert Pulled.read(tmp_path / "one.json") == ONE


def test_a_kind_counts_only_where_all_its_rows_are_within() -> None:
    assert holds(ROWS) and set(kept(ROWS)) == set(CLAIMED)
    batch = [replace(one, obtained=3.0) if (one.name, one.where) == ("batch size", "cpu") else one for one in ROWS]
    assert "batch size" not in kept(batch), "the H200's row does not stand in for the CPU's"
    elsewhere = [*ROWS, replace(ONE, name="compile", where="somewhere", obtained=3.0)]
    assert "compile" in kept(elsewhere) and "no (not claimed)" in as_page(elsewhere)
    assert not holds([replace(one, predicted=1.1, obtained=1.1) for one in ROWS]), "right, and worth nothing"


def test_runs_take_turns_until_they_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that gets slower all the time does not change what a lever is seen to bring."""
    assert _pulled(monkeypatch, [1.0, 0.55, 1.2, 0.65, 1.4]).obtained == pytest.approx(2.0)
    noisy = _pulled(monkeypatch, [1.0, 0.5, 1.0, 0.4, 1.0, 0.45, 1.0])
    assert noisy.rounds == 3 and noisy.obtained == pytest.approx(1 / 0.45) and noisy.spread > lever_case.STEADY


def _pulled(monkeypatch: pytest.MonkeyPatch, seconds: list[float]) -> Pulled:
    """A lever pulled on runs that took so long, one after the other."""
    taken: Iterator[float] = iter(seconds)
    lever = type("L", (), {"sets": "--set a=1", "of": "step_s", "speedup": 2.0})()
    found = type("D", (), {"levers": (), "lever": lambda self, number: lever})()
    for name, made in {"read_run": lambda run, home: run, "diagnose": lambda run, home: found, "keep": _nothing,
                       "number_of": lambda found, key: 1, "write_lever": _nothing, "load_recipe": _nothing,
                       "compare": _nothing, "measured": lambda run, of: run.seconds}.items():  # fmt: skip
        monkeypatch.setattr(lever_case, name, made)
    run = type("R", (), {"name": "one"})
    case = LeverCase(name="x", key="a", recipe=None, run=lambda recipe, home: _took(run(), next(taken)))  # type: ignore[arg-type]
    home = type("H", (), {"work": Path()})()
    return pull(case, home, where="cpu")


def _nothing(*args: object) -> None:
    """In place of what writes files."""


def _took(run: object, seconds: float) -> object:
    run.seconds = seconds  # type: ignore[attr-defined]
    return run


def test_recorded_rows_are_of_kinds_that_are_claimed() -> None:
    names = {Pulled.read(path).name for path in levers.FOLDER.glob("lever-*.json")}
    assert names and names <= set(CLAIMED)
