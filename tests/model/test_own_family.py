"""A family in a user's file (examples/own_family.py): trained, exported, loaded, saved and generated with."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from armillary.engine.generate import generate
from armillary.engine.request.sampling_params import Sampling
from armillary.errors import ArmillaryError
from armillary.model.weights.hf_weights import load_model, save_model
from armillary.spec.hf import user_family
from armillary.spec.hf.config import from_hf, to_hf
from armillary.spec.hf.user_family import Family, find_family, load_family_file, loaded_files
from armillary.store.home import Home
from armillary.training.prepare_run import train_recipe
from tests.cli.test_model_verbs import RECIPE, write_text
from tests.conftest import Ran
from tests.model.test_agreement import full_logits

FILE = Path(__file__).parents[2] / "examples" / "own_family.py"
CONFIG = {
    "model_type": "own_gpt_oss",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
    "vocab_size": 320,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


@pytest.fixture(autouse=True)
def unregistered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test begins as a process does."""
    for name in ("_registered", "_files"):
        monkeypatch.setattr(user_family, name, {})
    yield


def own_recipe(folder: Path) -> Path:
    """A recipe of a tiny model of that family, from scratch."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    body = RECIPE[RECIPE.index("[data]") :].format(source=write_text(folder / "text"))
    path = folder / "own.toml"
    path.write_text(f'[model]\npath = "{folder / "config.json"}"\ncode = "{FILE}"\n\n{body}')
    return path


def test_a_family_of_ones_own_is_trained_and_exported(tmp_path: Path) -> None:
    home = Home.at(tmp_path / "home")
    run = train_recipe(own_recipe(tmp_path), ["train.steps=2", "train.eval_every=2"], home=home, run="own").run
    folder = run.latest_export()
    assert folder is not None
    assert loaded_files() == (str(FILE),), "for the processes that are started"
    model = load_model(folder)
    assert model.config.family == "own_gpt_oss" and model.config.sinks and model.config.moe is not None
    again = load_model(save_model(model, tmp_path / "again"))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))
    twin = from_ours(folder, tmp_path / "twin")
    tokens_BT = torch.randint(0, 320, (1, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(full_logits(model, tokens_BT), full_logits(load_model(twin), tokens_BT))
    assert generate(folder, ["the quick"], Sampling(max_tokens=3), home=home)[0].text


def from_ours(export: Path, folder: Path) -> Path:
    """The same tensors under the model_type that is built in."""
    folder.mkdir()
    raw = json.loads((export / "config.json").read_text())
    rope = {"rope_scaling": {"rope_type": "default"}, "rope_theta": 150_000.0}
    (folder / "config.json").write_text(json.dumps(raw | {"model_type": "gpt_oss"} | rope))
    (folder / "model.safetensors").write_bytes((export / "model.safetensors").read_bytes())
    return folder


@pytest.mark.slow
def test_the_command_line_takes_the_file(cli: Callable[..., Ran], tmp_path: Path) -> None:
    assert cli("train", str(own_recipe(tmp_path)), "--run", "own", "--set", "train.steps=2").code == 0
    user_family._registered.clear()
    line = ("generate", "own", "the quick", "--max-tokens", "3")
    assert "--model-code FILE" in cli(*line).err
    own = ("--model-code", str(FILE))
    assert cli(*line, *own).code == 0
    user_family._registered.clear()
    assert "--model-code FILE" in cli("checkpoints", "export", "own").err
    assert cli("checkpoints", "export", "own", "--out", str(tmp_path / "exported"), *own).code == 0
    assert load_model(tmp_path / "exported").config.family == "own_gpt_oss"


def test_it_is_read_and_written_only_once_it_is_known(tmp_path: Path) -> None:
    with pytest.raises(ArmillaryError, match="ne of your own is given with --model-code"):
        from_hf(CONFIG, name="mine")
    load_family_file(FILE)
    config = from_hf(CONFIG, name="mine")
    assert from_hf(to_hf(config), name="mine") == config
    assert to_hf(config)["architectures"] == ["OwnGptOssForCausalLM"]


def test_what_a_file_lacks_is_said(tmp_path: Path) -> None:
    empty, nameless = tmp_path / "empty.py", tmp_path / "nameless.py"
    empty.write_text("x = 1\n")
    lines = "from armillary.spec.hf.user_family import Family\nF = [Family(model_type='m', read=dict)]\n"
    nameless.write_text(lines)
    for path, said in ((empty, "has no Family"), (nameless, "names no tensors"), (tmp_path / "no.py", "no file")):
        with pytest.raises(ArmillaryError, match=said):
            load_family_file(path)


def test_packages_are_asked_for_what_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    made: Any = Family(model_type="packaged", read=lambda raw: {}, rules=lambda config: [])

    class Point:
        name, value = "packaged", "package:FAMILY"

        def load(self) -> Any:
            return made

    monkeypatch.setattr(user_family, "_entry_points_loaded", False)
    monkeypatch.setattr(
        "importlib.metadata.entry_points", lambda group: [Point()] if group == "armillary.families" else []
    )
    assert find_family("packaged") is made and find_family("other") is None
