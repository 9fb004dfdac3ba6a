"""A CPU of which nothing was measured has the catalogue's rates, but not those of units that it lacks."""

from __future__ import annotations

from pathlib import Path

import pytest

from armillary.machine import features
from armillary.machine.machine import here
from armillary.planning.training.resolve_recipe import EMULATED, resolve
from armillary.spec.recipe import recipe_from_dict
from armillary.store.home import Home


@pytest.mark.parametrize(("has_bf16", "ratio"), [(False, EMULATED), (True, 16.0)])
def test_emulated_dtypes_are_slower_than_fp32(
    has_bf16: bool, ratio: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features, "has_native", lambda dtype: has_bf16 or dtype != "bf16")
    job = {"sequence": 128, "batch_tokens": 4096}
    recipe = recipe_from_dict({"model": {"name": "armillary-2m"}, "hardware": {"on": "here"}, "train": job})
    found = resolve(recipe, recipe.model_config(), recipe.cluster(here()), Home.at(tmp_path))
    if found.case.cluster.chip.kind != "cpu":
        pytest.skip("a GPU is here")
    flops = found.case.cluster.chip.flops
    assert flops["bf16"] / flops["fp32"] == pytest.approx(ratio, rel=0.01)
    assert any("not measured" in note for note in found.notes)
