"""`armillary train --draft-for`: the head learns, is kept beside the model, and drafts tokens that are accepted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from armillary.engine.llm import LLM
from armillary.engine.request.sampling_params import SamplingParams
from armillary.model.layers.attention_forms import plain
from armillary.model.transformer import build
from armillary.spec.recipe import Recipe, to_toml
from armillary.spec.tables.serve import Serve
from armillary.store.home import Home
from armillary.store.runs import find_run
from armillary.training.draft_head import new_draft_head
from tests.conftest import Ran
from tests.engine.runner.test_draft_head import force
from tests.model.layers.test_attention_forms import small


def test_a_new_head_passes_the_hidden_state_through_the_last_layer() -> None:
    model = build(small(num_layers=2), dtype=torch.float32, device="cpu", seed=3)
    head, last = new_draft_head(model), model.blocks["1"]
    assert model.rotary is not None
    hidden_BTH, at = torch.randn(1, 6, model.config.hidden), torch.arange(6)[None]
    with torch.no_grad():
        made = head(hidden_BTH, torch.zeros_like(hidden_BTH), model.rotary(at), plain, 0)
        normed = hidden_BTH / hidden_BTH.square().mean(-1, keepdim=True).sqrt()
        expected = model.norm(last(normed, model.rotary(at), plain, 1))  # type: ignore[misc]
    assert torch.allclose(made, expected, atol=1e-4)


def test_a_head_is_trained_beside_a_run_and_drafts_for_it(
    cli: Callable[..., Ran], recipe: Callable[..., Recipe], tmp_path: Path, home: Home
) -> None:
    file, job = tmp_path / "recipe.toml", ("train.steps=80", "train.batch_tokens=512", "train.lr=0.01")
    file.write_text(to_toml(recipe(*job)))
    cli("train", str(file), "--run", "base", "--device", "cpu")
    ran = cli("train", str(file), "--draft-for", "base", "--device", "cpu", "--json")
    made, folder = json.loads(ran.out), find_run(home, "base").latest_export()
    assert folder is not None and made["folder"] == str(folder / "draft_head")
    assert made["agreed"][0] > 0.5 and all(0 < each <= 1 for each in made["accepted"])
    prompt, params = "def function_3_4(x):\n", SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    answers, drafts = [], Serve(max_running=2, kv_bytes=400_000, speculate="mtp")
    for serve in (Serve(max_running=2, kv_bytes=400_000), drafts):
        llm = LLM(folder, serve, device="cpu", dtype="fp32", home=home)
        if serve is drafts:
            force(llm.engine)
        answers.append(llm.generate([prompt], params)[0].tokens)
    assert answers[0] == answers[1]
    assert llm.engine.scheduler.totals.accepted > 0.3 * llm.engine.scheduler.totals.drafted > 5


@pytest.mark.parametrize("more", [("--run", "other"), ("--new",), ("--dry-run",), ("--devices", "2")])
def test_a_head_has_no_run_of_its_own(
    more: tuple[str, ...], cli: Callable[..., Ran], recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    (tmp_path / "recipe.toml").write_text(to_toml(recipe()))
    ran = cli("train", str(tmp_path / "recipe.toml"), "--draft-for", "base", *more)
    assert ran.code == 2 and "trains a head on one device, without a run of its own" in ran.err
