"""A CPU of which nothing was measured has the catalogue's rates, but not those of units that it lacks."""

from __future__ import annotations

from pathlib import Path

import pytest

from armillary.machine import features
from armillary.machine.device_name import device_name
from armillary.machine.machine import here
from armillary.planning.training.resolve_recipe import EMULATED, TrainingProblem, resolve
from armillary.profiling.dtypes.rates import PROBE
from armillary.spec.recipe import recipe_from_dict
from armillary.store.home import Home
from armillary.store.peaks import new_peaks, save_peaks


def problem(home: Home) -> TrainingProblem:
    tables = {
        "model": {"name": "armillary-2m"},
        "hardware": {"on": "here"},
        "layout": {"precision": "fp32"},
        "train": {"sequence": 128, "batch_tokens": 4096},
    }
    recipe = recipe_from_dict(tables)
    return resolve(recipe, recipe.model_config(), recipe.cluster(here(device="cpu")), home)


def bf16_over_fp32(found: TrainingProblem) -> float:
    flops = found.case.cluster.chip.flops
    return flops["bf16"] / flops["fp32"]


@pytest.mark.parametrize(("has_bf16", "ratio"), [(False, EMULATED), (True, 16.0)])
def test_emulated_dtypes_are_slower_than_fp32(
    has_bf16: bool, ratio: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features, "has_native", lambda dtype: has_bf16 or dtype != "bf16")
    found = problem(Home.at(tmp_path))
    assert bf16_over_fp32(found) == pytest.approx(ratio, rel=0.01)
    assert any("not measured" in note for note in found.notes)


def test_a_probe_says_how_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "has_native", lambda dtype: dtype != "bf16")
    home = Home.at(tmp_path)
    points = [{"dtype": "fp32", "flops": 100e9}, {"dtype": "bf16", "flops": 60e9}]
    save_peaks(home, new_peaks(device_name("cpu")).with_points(PROBE, points))
    assert bf16_over_fp32(problem(home)) == pytest.approx(0.6)


@pytest.mark.parametrize(("other_cores", "is_said"), [(1.7, True), (0.1, False), (None, False)])
def test_a_machine_measured_beside_other_work_is_said(other_cores: float | None, is_said: bool, tmp_path: Path) -> None:
    home = Home.at(tmp_path)
    peaks = new_peaks(device_name("cpu"), {"other_cores": other_cores})
    peaks = peaks.with_points("gemm", [{"m": 512, "n": 512, "k": 512, "dtype": "fp32", "flops": 1e11}])
    save_peaks(home, peaks.with_points("copy", [{"bytes": 2**26, "bytes_per_s": 1e10}]))
    assert any("kept 1.7 cores busy" in note for note in problem(home).notes) == is_said
