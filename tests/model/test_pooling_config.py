"""What sentence-transformers keeps beside a model's weights, read as it means it; and folders without a head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from armillary.model.pooling_config import PoolingConfig, pooling_config
from armillary.model.transformer import build
from armillary.model.weights.hf_weights import load_model, save_model
from tests.model.layers.test_attention_forms import small


def folder_with(path: Path, modules: list[str], pooling: dict[str, Any], **config: Any) -> Path:
    listed = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(modules)
    ]
    (path / "modules.json").write_text(json.dumps(listed))
    (path / "config.json").write_text(json.dumps(config))
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return path


@pytest.mark.parametrize(
    ("pooling", "mode"),
    [
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False, "include_prompt": True}, "last"),
        ({"pooling_mode_mean_tokens": True, "word_embedding_dimension": 8}, "mean"),
        ({"pooling_mode_cls_token": True, "pooling_mode_lasttoken": False}, "cls"),
        ({"pooling_mode": "mean"}, "mean"),
    ],
)
def test_pooling_of_a_model(tmp_path: Path, pooling: dict[str, Any], mode: str) -> None:
    folder = folder_with(tmp_path, ["Transformer", "Pooling", "Normalize"], pooling)
    prompts = {"query": "Query: ", "document": "", "passage": "P: "}
    (folder / "config_sentence_transformers.json").write_text(
        json.dumps({"prompts": prompts, "default_prompt_name": "passage"})
    )
    found = pooling_config(folder)
    assert found == PoolingConfig(mode=mode, described=True, prompts=prompts, default_prompt="P: ")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("modules", "pooling", "config", "says"),
    [
        (["Transformer", "Pooling"], {"pooling_mode_max_tokens": True}, {}, "max_tokens"),
        (["Transformer", "Pooling"], {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, {}, "and"),
        (["Transformer", "Pooling", "Dense"], {"pooling_mode_lasttoken": True}, {}, "Dense"),
        (["Transformer", "Pooling"], {"pooling_mode_mean_tokens": True, "include_prompt": False}, {}, "prompt"),
        (["Transformer", "Pooling"], {"pooling_mode_mean_tokens": True}, {"is_causal": False}, "both directions"),
        (["Transformer", "Pooling"], {}, {"use_bidirectional_attention": True}, "both directions"),
    ],
)
def test_what_is_not_computed_here_is_named(
    tmp_path: Path, modules: list[str], pooling: dict[str, Any], config: dict[str, Any], says: str
) -> None:
    assert says in pooling_config(folder_with(tmp_path, modules, pooling, **config)).unsupported


def test_a_folder_that_says_nothing_pools_the_last_token(tmp_path: Path) -> None:
    assert pooling_config(tmp_path) == PoolingConfig()


def test_weights_that_were_saved_without_a_head(tmp_path: Path) -> None:
    """As Qwen3-Embedding and e5-mistral are: no "model." before names, no lm_head, architecture …Model."""
    model = build(small(tied=True), dtype=torch.float32, device="cpu", seed=3)
    folder = save_model(model, tmp_path / "m")
    file = folder / "model.safetensors"
    save_file({name.removeprefix("model."): tensor for name, tensor in load_file(file).items()}, file)
    raw = json.loads((folder / "config.json").read_text())
    family = raw["architectures"][0].removesuffix("ForCausalLM")
    raw |= {"architectures": [f"{family}Model"], "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(raw))
    loaded = load_model(folder, dtype="fp32")
    for (name, right), (_, found) in zip(model.named_parameters(), loaded.named_parameters(), strict=True):
        assert torch.equal(right, found), name


def test_converted_folders_keep_their_pooling(tmp_path: Path) -> None:
    folder_with(tmp_path, ["Transformer", "Pooling"], {"pooling_mode_mean_tokens": True})
    model = build(small(tied=True), dtype=torch.float32, device="cpu", seed=3)
    saved = save_model(model, tmp_path / "m", template=tmp_path)
    assert pooling_config(saved).mode == "mean"
    save_model(model, tmp_path / "m", template=tmp_path, overwrite=True)
