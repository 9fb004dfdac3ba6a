"""The layout of one engine for so many devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from armillary.errors import BadLayout
from armillary.planning.serving import engine_layout as engine_layouts
from armillary.planning.serving.engine_layout import EngineLayout, engine_layout
from armillary.planning.serving.serving_plan import serving_request
from armillary.spec import catalogue
from armillary.spec.recipe import recipe_from_dict
from armillary.store.home import Home


def chosen(tmp_path: Path, model: str, devices: int, **tables: Any) -> tuple[EngineLayout, str]:
    recipe = recipe_from_dict({"model": {"name": model}, "hardware": {"on": "h100x8"}} | tables)
    config = catalogue.models()[model].config
    request = serving_request(recipe, config, recipe.cluster(), Home(work=tmp_path, cache=tmp_path))
    return engine_layout(request, recipe.layout, devices)


def test_stages_lengthen_requests_so_that_tp_is_preferred(tmp_path: Path) -> None:
    layout, why = chosen(tmp_path, "llama-3.1-8b", 8)
    assert (layout.tp, layout.pp) == (8, 1)
    assert why.startswith("tp=4 × pp=2") and why.count("requests/s") == 4  # by a sixth


def test_stages_that_promise_much_more_are_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_layouts, "_WORTH", 1.1)
    layout, _ = chosen(tmp_path, "llama-3.1-8b", 8)
    assert (layout.tp, layout.pp) == (4, 2)


def test_stages_are_for_what_tp_does_not_divide(tmp_path: Path) -> None:
    layout, _ = chosen(tmp_path, "gpt2-xl", 2)  # 25 heads
    assert (layout.tp, layout.pp) == (1, 2)


def test_a_layout_that_misses_the_objectives_is_better_than_none(tmp_path: Path) -> None:
    layout, why = chosen(tmp_path, "llama-3.1-8b", 2, objective={"ttft_p99_s": 1e-6})
    assert layout.tp == 2 and why.endswith("none meets the objectives")


def test_ranks_of_one_cpu_are_not_priced(tmp_path: Path) -> None:
    layout, why = chosen(tmp_path, "gpt2-xl", 10, hardware={"on": "cpux1"})
    assert (layout.tp, layout.pp) == (5, 2) and "no speed is predicted" in why


def test_what_fits_in_no_way_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadLayout, match=r"no layout of llama-3\.1-405b on 2 devices"):
        chosen(tmp_path, "llama-3.1-405b", 2)


def test_copies_of_attention_are_priced_for_models_with_experts(tmp_path: Path) -> None:
    """Of one latent head every tp rank has a copy, so that copies of attention hold as many more requests."""
    layout, why = chosen(tmp_path, "deepseek-v2-lite", 8, traffic={"tokens_in": 200, "tokens_out": 2000})
    assert "dp_attention=8" in why and "tp=2 × dp_attention=4" in why
    assert layout.copies > 1 and layout.tp * layout.copies == 8


def test_copies_that_were_asked_for_are_the_only_ones(tmp_path: Path) -> None:
    layout, why = chosen(tmp_path, "deepseek-v2-lite", 8, serve={"dp_attention": 4})
    assert (layout.tp, layout.copies) == (2, 4) and why.count("requests/s") == 1


def test_experts_are_whole_where_ranks_divide_them() -> None:
    config = catalogue.models()["deepseek-v2-lite"].config
    assert config.moe is not None and config.moe.num_experts == 64
    assert EngineLayout(tp=2, copies=4).expert_groups(config) == 8
    assert EngineLayout(tp=1, copies=128).expert_groups(config) == 64
    assert EngineLayout(tp=8).expert_groups(catalogue.models()["llama-3.1-8b"].config) is None
