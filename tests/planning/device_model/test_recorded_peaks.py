"""Ceilings recorded on another device of a chip stand in where the device at hand was not measured."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from armillary.planning.device_model.recorded_peaks import recorded_peaks
from armillary.planning.device_model.vectorised_layouts import PRECISIONS
from armillary.planning.node_ranking import rank_nodes
from armillary.planning.training.resolve_recipe import TrainingProblem, resolve
from armillary.planning.training.search import fastest
from armillary.spec import catalogue
from armillary.spec.recipe import recipe_from_dict
from armillary.spec.tables.traffic import Cost
from armillary.store.home import Home
from armillary.store.peaks import new_peaks, save_peaks


def resolved(on: str, home: Home) -> TrainingProblem:
    tables = {
        "model": {"name": "llama-3.2-1b"},
        "hardware": {"on": on},
        "train": {"sequence": 2048, "batch_tokens": 32768, "steps": 10},
    }
    recipe = recipe_from_dict(tables)
    return resolve(recipe, recipe.model_config(), recipe.cluster(), home)


def test_an_unmeasured_h200_has_the_ceilings_of_another(tmp_path: Path) -> None:
    problem = resolved("h200x1", Home.at(tmp_path))
    recorded, plain = problem.case, replace(problem.case, recorded=None)
    assert recorded.curves.source == "another NVIDIA H200, measured 2026-11-15"
    assert any("armillary bench ceilings measures yours" in note for note in problem.notes)
    assert 0.8 < fastest(recorded).time.total[0] / fastest(plain).time.total[0] < 0.95


def test_a_grouped_gemm_has_the_recorded_rate_of_grouped_ones(tmp_path: Path) -> None:
    curves = resolved("h200x1", Home.at(tmp_path)).case.curves
    bf16, (m, n, k) = np.array([PRECISIONS.index("bf16")]), (np.array([float(size)]) for size in (8192, 8192, 2048))
    assert curves.grouped == pytest.approx(659 / 833)
    plain, grouped = (curves.gemm_flops(bf16, m, n, k, groups)[0] for groups in (1.0, 8.0))
    assert 0.85 < grouped / plain < 0.95  # the power limit holds back the plain one


def test_what_was_measured_here_comes_first(tmp_path: Path) -> None:
    home = Home.at(tmp_path)
    point = {"m": 8192, "n": 8192, "k": 8192, "dtype": "bf16", "flops": 3e14}
    peaks = new_peaks("NVIDIA H200").with_points("gemm", [point])
    save_peaks(home, peaks.with_points("copy", [{"bytes": 2**30, "bytes_per_s": 1e12}]))
    case = resolved("h200x1", home).case
    assert case.recorded is None and case.curves.achieved["bf16"] == 3e14


def test_other_chips_and_other_power_limits_have_none(tmp_path: Path) -> None:
    case = resolved("h100x1", Home.at(tmp_path)).case
    assert case.recorded is None and case.curves.source == "catalogue"
    h200 = catalogue.chip("h200")
    assert recorded_peaks(h200) is not None
    assert recorded_peaks(replace(h200, power_limit_w=500.0)) is None


def test_a_ranking_compares_all_chips_by_the_catalogue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = {"dgx-h200": catalogue.nodes()["dgx-h200"]}
    monkeypatch.setattr(catalogue, "nodes", lambda: nodes)
    case = resolved("h200x8", Home.at(tmp_path)).case
    (ranked,) = rank_nodes(case, devices=8, steps=1, cost=Cost())
    assert ranked.best is not None and ranked.best.case.curves.source == "catalogue"
