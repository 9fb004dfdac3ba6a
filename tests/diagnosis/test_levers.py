"""Levers that were pulled: what is allowed, and which kinds came out as predicted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from armillary.store.home import Home
from tests.diagnosis.trained import reading_of
from tests.planted import lever_case, recorded
from tests.planted.lever_case import LeverCase, Pulled, figure, pull
from tests.planted.lever_table import CLAIMED, as_page, holds, kept

ONE = Pulled(name="compile", change="--set a=1", of="step_s", predicted=1.5, obtained=1.4, where="cpu")
ROWS = [replace(ONE, name=name, where=where) for name, places in CLAIMED.items() for where in places]


def test_what_is_allowed_grows_with_what_was_promised(tmp_path: Path) -> None:
    assert ONE.within and not replace(ONE, obtained=1.66).within
    assert replace(ONE, predicted=1.01, obtained=1.03).within and not replace(ONE, predicted=1.01, obtained=1.07).within
    ONE.write(tmp_path / "one.json")
    assert Pulled.read(tmp_path / "one.json") == ONE


def test_a_kind_counts_only_where_all_its_rows_are_within() -> None:
    assert holds(ROWS) and set(kept(ROWS)) == set(CLAIMED)
    another = [*ROWS, replace(ONE, name="batch size", where="H200", obtained=3.0)]
    assert "batch size" not in kept(another), "one row there does not stand in for the other"
    elsewhere = [*ROWS, replace(ONE, name="compile", where="somewhere", obtained=3.0)]
    assert "compile" in kept(elsewhere) and "no (not claimed)" in as_page(elsewhere)
    assert not holds([replace(one, predicted=1.1, obtained=1.1) for one in ROWS]), "right, and worth nothing"


def test_runs_take_turns_until_they_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is slow at times does not change what a lever is seen to bring."""
    assert _pulled(monkeypatch, [1.0, 0.5, 1.01, 0.5, 1.0]).rounds == lever_case.FEWEST
    noisy = _pulled(monkeypatch, [1.0, 0.9, 1.2, 0.5, 1.0, 0.5, 1.0])
    assert noisy.rounds == 3 and noisy.obtained == pytest.approx(2.0) and noisy.spread > lever_case.STEADY


def test_where_the_machine_changed_all_is_done_once_more_and_the_steadier_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changed, unchanged = [1.0, 0.5, 1.8, 0.5, 1.0], [1.0, 0.8, 1.0, 0.8, 1.0]
    found = _pulled(monkeypatch, [*changed, *unchanged])
    assert found.obtained == pytest.approx(1.25) and found.unsteady == pytest.approx(1.0)
    worse = [2.0, 0.5, 1.0, 0.5, 1.0]
    assert _pulled(monkeypatch, [*changed, *worse]).unsteady == pytest.approx(1.8)


def test_waiting_counts_as_it_is() -> None:
    quick, slow = reading_of(step_s=lambda step: 0.5 if step % 4 else 1.0), reading_of(step_s=2.0)
    assert figure("step_s", [quick, slow]) == 0.5
    assert figure("step_s", [reading_of(step_s=one) for one in (1.0, 2.0)], waits=True) == pytest.approx(1.5)
    served = [replace(quick, values={"tokens_out_per_s": rate}) for rate in (5.0, 8.0)]
    assert figure("tokens_out_per_s", served) == pytest.approx(6.5)


def _pulled(monkeypatch: pytest.MonkeyPatch, seconds: list[float]) -> Pulled:
    """A lever applied on runs that took so long, one after the other."""
    taken = iter(seconds)
    lever = type("L", (), {"sets": "--set a=1", "of": "step_s", "speedup": 2.0})()
    found = type("D", (), {"levers": (), "lever": lambda self, number: lever})()
    for name, made in {
        "read_run": lambda run, home: reading_of(step_s=run.seconds),
        "save": _nothing,
        "diagnose": lambda run, home: found,
        "number_of": lambda found, key: 1,
        "write_lever": _nothing,
        "load_recipe": _nothing,
        "compare": _nothing,
    }.items():
        monkeypatch.setattr(lever_case, name, made)
    case = LeverCase(name="x", key="a", recipe=None, run=lambda recipe, home: _Took(next(taken)))  # type: ignore[arg-type, return-value]
    return pull(case, Home.at("."), where="cpu")


class _Took:
    """A run that took so long."""

    name = "one"

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds


def _nothing(*args: object) -> None:
    """In place of what writes files."""


def test_recorded_rows_are_of_kinds_that_are_claimed() -> None:
    names = {Pulled.read(path).name for path in recorded.FOLDER.glob("lever-*.json")}
    assert names and names <= set(CLAIMED)
