"""Corrections: few runs move factors little, many find them, and what does not help is not kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from armillary.errors import BadData, NotFound
from armillary.planning.device_model.correction import (
    PARTS,
    Correction,
    RunTime,
    corrections,
    fit_correction,
    fit_factors,
    load_correction,
    remove_corrections,
    save_correction,
)
from armillary.planning.device_model.vectorised_layouts import as_arrays
from armillary.planning.training.step_time import step_time
from armillary.spec.layout import Layout
from armillary.store.home import Home
from tests.planning.cases import case_of


def runs_of(count: int, noise: float = 0.0, **true: float) -> list[RunTime]:
    """Runs whose parts really take `true` times what is planned."""
    dice, made = np.random.default_rng(0), []
    for i in range(count):
        planned = dict(zip(PARTS, dice.uniform(0.1, 1.0, size=3).tolist(), strict=True))
        measured = sum(true.get(part, 1.0) * seconds for part, seconds in planned.items())
        made.append(RunTime(name=f"r{i}", planned=planned, measured_s=measured * float(np.exp(dice.normal(0, noise)))))
    return made


def test_many_runs_find_the_factors() -> None:
    found = fit_factors(runs_of(60, noise=0.03, compute=1.3, communication=0.7))
    assert found["compute"] == pytest.approx(1.3, rel=0.05) and found["communication"] == pytest.approx(0.7, rel=0.1)


def test_a_single_run_is_followed_in_part_only() -> None:
    run = RunTime(name="one", measured_s=2.0, planned={"compute": 1.0, "communication": 0.0, "overhead": 0.0})
    factors = fit_factors([run])
    assert 1.3 < factors["compute"] < 2.0 and factors["communication"] == factors["overhead"] == 1.0
    assert fit_factors([]) == dict.fromkeys(PARTS, 1.0)


def test_what_helps_unseen_runs_is_kept_and_what_does_not_is_known() -> None:
    good = fit_correction("h100", runs_of(6, noise=0.02, compute=1.4, overhead=1.4, communication=1.4))
    assert good.helps and good.error_left_out is not None and good.error_left_out < 0.5 * good.error_before
    opposite = [replace(runs_of(1)[0], name=f"r{x}", measured_s=x * runs_of(1)[0].seconds({})) for x in (0.6, 1.5)]
    assert not fit_correction("h100", opposite).helps


def test_stored_listed_and_removed(tmp_path: Path) -> None:
    home = Home.at(tmp_path)
    kept = fit_correction("core of X (no bf16)", runs_of(3, compute=1.2))
    path = save_correction(home, kept)
    assert load_correction(home, kept.chip) == kept and corrections(home) == [kept]
    assert load_correction(home, "h100") is None
    assert remove_corrections(home, kept.chip) == [kept] and corrections(home) == []
    with pytest.raises(NotFound, match="none is stored"):
        remove_corrections(home, kept.chip)
    path.write_text('{"chip": "x", "compute": -1, "runs": []}')
    with pytest.raises(BadData, match="delete it"):
        corrections(home)


def test_a_step_is_corrected_part_by_part() -> None:
    case = case_of("llama-3-8b", "h100x16", sequences=64)
    layouts = as_arrays([Layout(tp=2, pp=2, dp=4, zero=1)])
    plain = step_time(case, layouts)
    fixed = Correction(chip="h100", compute=1.1, communication=2.0, overhead=0.5)
    corrected = step_time(replace(case, correction=fixed), layouts)
    parts = 1.1 * (plain.compute + plain.bubble) + 2.0 * plain.exposed + 0.5 * plain.overhead
    assert corrected.total[0] == pytest.approx(parts[0]) and plain.exposed[0] > 0 and plain.bubble[0] > 0
