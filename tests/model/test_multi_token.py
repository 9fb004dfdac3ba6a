"""Multi-token-prediction layers: read from a folder, equal to transformers', and no hindrance to loading the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpLayer as TheirLayer
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer, DeepseekV3RMSNorm

from armillary.errors import BadModel
from armillary.model.layers.attention_forms import plain
from armillary.model.weights.hf_weights import load_model
from armillary.model.weights.mtp_weights import load_mtp_layers
from tests.model.families import random_model
from tests.model.quantized.folders import SCHEMES, compress, scheme_of
from tests.model.test_agreement import assert_close

DEPTH = 3
SHAPE = {"num_hidden_layers": DEPTH, "first_k_dense_replace": 1, "num_nextn_predict_layers": 2}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, object, list[torch.nn.Module]]:
    """A folder with two such layers, its model, and the layers."""
    folder = tmp_path_factory.mktemp("mtp") / "model"
    theirs = random_model("deepseek_v3", 1, **SHAPE)
    return folder, theirs, with_mtp_layers(folder, theirs)


def with_mtp_layers(folder: Path, theirs: Any) -> list[torch.nn.Module]:
    """Save a model with two random layers after its last."""
    theirs.save_pretrained(folder)
    torch.manual_seed(5)
    layers = [TheirLayer(theirs.config, DeepseekV3DecoderLayer, DeepseekV3RMSNorm, DEPTH) for _ in range(2)]
    tensors = load_file(folder / "model.safetensors")
    for depth, layer in enumerate(layers):
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        tensors |= _as_deepseek_stores(layer.state_dict(), f"model.layers.{DEPTH + depth}.")
        tensors[f"model.layers.{DEPTH + depth}.shared_head.head.weight"] = theirs.lm_head.weight.detach().clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return layers


def _as_deepseek_stores(state: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    named = {}
    for name, tensor in state.items():
        name = name.removeprefix("mtp_block.").replace("post_norm", "shared_head.norm")
        if name.endswith("experts.gate_up_proj"):
            for e, both in enumerate(tensor):
                gate, up = both.chunk(2)
                named |= {f"mlp.experts.{e}.gate_proj.weight": gate, f"mlp.experts.{e}.up_proj.weight": up}
        elif name.endswith("experts.down_proj"):
            named |= {f"mlp.experts.{e}.down_proj.weight": down for e, down in enumerate(tensor)}
        else:
            named[name] = tensor
    return {prefix + name: tensor.contiguous().clone() for name, tensor in named.items()}


@torch.no_grad()
def test_layers_equal_those_of_transformers(stored: tuple[Path, object, list[torch.nn.Module]]) -> None:
    folder, theirs, their_layers = stored
    model, layers = load_model(folder), load_mtp_layers(folder)
    assert len(layers) == 2 and model.rotary is not None
    tokens_BT = torch.randint(0, model.config.vocab, (2, 20))
    positions_BT = torch.arange(20).expand(2, -1)
    hidden = model(tokens_BT, positions_BT, plain)
    cos_sin, cos_sin_theirs = model.rotary(positions_BT), theirs.model.rotary_emb(hidden, positions_BT)
    mask = torch.full((20, 20), -torch.inf).triu(1)[None, None]
    expected = hidden
    for ours, their in zip(layers, their_layers, strict=True):
        embedded = model.embed(tokens_BT.roll(-1, 1), positions_BT)
        hidden = ours(hidden, embedded, cos_sin, plain, DEPTH)
        expected = their(embedded, expected, cos_sin_theirs, mask, positions_BT, None)
        assert_close(hidden, expected)


@torch.no_grad()
@pytest.mark.parametrize("format", ["fp8 per row", "int8 per row"])
def test_quantized_layers_are_dequantised(
    format: str, stored: tuple[Path, object, list[torch.nn.Module]], tmp_path: Path
) -> None:
    """As DeepSeek publishes them: every linear layer of theirs, the join too. The model loads beside them."""
    name, weights = SCHEMES[format]
    scheme = scheme_of(weights)
    tensors = load_file(stored[0] / "model.safetensors")
    own = [key for key in tensors if key.startswith("model.layers.") and int(key.split(".")[2]) >= DEPTH]
    linear = [key for key in own if key.endswith("_proj.weight") or key.endswith("kv_a_proj_with_mqa.weight")]
    for key in linear:
        packed = compress(tensors.pop(key), scheme, name)
        tensors |= {f"{key.removesuffix('weight')}{part}": tensor.contiguous() for part, tensor in packed.items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    table = {"quant_method": "compressed-tensors", "config_groups": {"g": {"targets": ["Linear"], "weights": weights}}}
    config = json.loads((stored[0] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": table}))
    load_model(tmp_path, packed=True)
    for plain_layer, layer in zip(load_mtp_layers(stored[0]), load_mtp_layers(tmp_path), strict=True):
        for (key, expected), found in zip(plain_layer.named_parameters(), layer.parameters(), strict=True):
            error = float((found - expected).norm() / expected.norm())
            is_linear = key.endswith("weight") and "norm" not in key and "router" not in key
            assert error < 0.05 and (error > 1e-4) == (is_linear or ".experts." in key), key


def test_a_folder_without_them_has_none(tmp_path: Path) -> None:
    random_model("deepseek_v3", 1).save_pretrained(tmp_path / "model")
    assert load_mtp_layers(tmp_path / "model") == []


def test_layers_beyond_the_last_are_refused_without_their_join(
    stored: tuple[Path, object, list[torch.nn.Module]], tmp_path: Path
) -> None:
    tensors = load_file(stored[0] / "model.safetensors")
    config = json.loads((stored[0] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({k: v for k, v in tensors.items() if "eh_proj" not in k}, tmp_path / "model.safetensors")
    with pytest.raises(BadModel, match="not part of a deepseek_v3 model"):
        load_model(tmp_path)
    save_file({k: v for k, v in tensors.items() if "3.hnorm" not in k}, tmp_path / "model.safetensors")
    load_model(tmp_path)
    with pytest.raises(BadModel, match=r"hnorm\.weight is missing"):
        load_mtp_layers(tmp_path)
