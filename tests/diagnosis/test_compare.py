"""Two runs compared: what was predicted, what was obtained, and the record that is kept of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from armillary.diagnosis.compare import as_kept, compare
from armillary.diagnosis.diagnose import diagnose
from armillary.diagnosis.diagnosis import FILE
from armillary.diagnosis.read_run import read_run
from armillary.diagnosis.track_record import read_record, remember, summary
from armillary.store.home import Home
from armillary.store.runs import Run
from tests.diagnosis.trained import plan_of, run_of


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home.at(tmp_path)


def before(home: Home) -> Run:
    return run_of(home, plan_of(), name="quiet-otter", data_wait_s=0.5)


def after(home: Home, seconds: float = 0.6, workers: int = 3) -> Run:
    return run_of(home, plan_of(f"data.workers={workers}"), name=f"bold-heron-{seconds}".replace(".", "-"),
                  step_s=seconds)  # fmt: skip


def test_a_lever_that_was_applied_is_held_to_its_word(home: Home) -> None:
    a = before(home)
    lever = diagnose(read_run(a, home), home).levers[0]
    remember(home, as_kept(a, lever, recipe="x.toml"))
    assert summary(read_record(home)) == "no lever was measured yet"
    b = after(home)
    found = compare(a, b, home)
    assert found.predicted == pytest.approx(2.0) and found.obtained == pytest.approx(1 / 0.6)
    assert found.change == {"data.workers": 3} and found.title == "loader workers 0 → 3"
    (kept,) = read_record(home)
    assert kept.by == b.id and kept.error == pytest.approx(1 - 1 / 1.2) and kept.recipe == "x.toml"
    compare(a, b, home)
    assert len(read_record(home)) == 1, "the same two runs are one line"
    compare(a, after(home, 0.5), home)
    assert len(read_record(home)) == 2 and summary(read_record(home)) == "2 levers, median error 8%"


def test_a_diagnosis_that_was_kept_is_a_prediction_too(home: Home) -> None:
    a = before(home)
    (a.folder / FILE).write_text(diagnose(read_run(a, home), home).to_json())
    assert compare(a, after(home), home).predicted == pytest.approx(2.0)


def test_a_change_that_nobody_predicted(home: Home) -> None:
    found = compare(before(home), after(home, workers=7), home)
    assert found.predicted is None and found.error is None and read_record(home) == []
    assert found.obtained == pytest.approx(1 / 0.6)
