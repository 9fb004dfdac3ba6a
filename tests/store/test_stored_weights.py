"""Bytes of a checkpoint once loaded, read from headers, against what is loaded; plans take them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from armillary.model.quantized.packed_linear import loaded_bytes
from armillary.model.weights.hf_weights import load_model
from armillary.planning.serving.deployment_options import server_of
from armillary.planning.serving.serving_memory import serving_memory
from armillary.planning.serving.serving_plan import serving_request
from armillary.spec.hf.config import from_hf
from armillary.spec.recipe import recipe_from_dict
from armillary.store.gguf.local_folder import gguf_folder
from armillary.store.home import Home
from armillary.store.stored_weights import stored_weights
from tests.model.quantized.folders import FOLDERS, tiny_llama
from tests.model.quantized.test_loaded_bytes import WIDE
from tests.model.weights.test_gguf_weights import Q, write_gguf

FORMATS = {"gptq": "int4", "awq": "int4", "nf4": "int4", "int8": "int8", "fp8 blocks": "fp8", "fp8 per row": "fp8"}
FORMATS |= {"int8 per row": "int8", "int4 groups with zeros": "int4", "nvfp4": "fp4", "mxfp4": "fp4"}


@pytest.mark.parametrize("name", FOLDERS)
@torch.no_grad()
def test_folders_and_their_plans(name: str, tmp_path: Path) -> None:
    folder = FOLDERS[name](tmp_path / "m", tiny_llama(**WIDE))
    stored = stored_weights(folder)
    assert stored is not None and stored.format == FORMATS[name]
    for dtype, itemsize in (("fp32", 4), ("bf16", 2)):
        held = loaded_bytes(load_model(folder, dtype=dtype, packed=True))
        assert stored.loaded_bytes(itemsize) == pytest.approx(held, rel=0.05)
    recipe = recipe_from_dict(
        {"model": {"path": str(folder)}, "hardware": {"on": "h100x1"}, "traffic": {"tokens_in": 8, "tokens_out": 8}}
    )
    config = from_hf(json.loads((folder / "config.json").read_text()), name="m")
    request = serving_request(recipe, config, recipe.cluster(), Home.at(tmp_path))
    replica = server_of(request, recipe.layout).replica
    assert replica.dtypes.weights == FORMATS[name]
    assert serving_memory(replica).weights_bytes == pytest.approx(held, rel=0.05)


@pytest.mark.parametrize(("kind", "format"), [("Q8_0", "int8"), ("Q4_0", "int4"), ("F16", "")])
@torch.no_grad()
def test_gguf(kind: str, format: str, tmp_path: Path) -> None:
    ends = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "embed_tokens", "lm_head")
    path = write_gguf(tmp_path / "m.gguf", tiny_llama(**WIDE), "llama", dict.fromkeys(ends, Q[kind]))
    stored = stored_weights(path)
    assert stored is not None and stored.format == format and stored_weights(tmp_path) is None
    held = loaded_bytes(load_model(gguf_folder(path, Home.at(tmp_path)), packed=True))
    assert stored.loaded_bytes(2) == pytest.approx(held, rel=0.05)


def test_what_is_no_checkpoint_has_none(tmp_path: Path) -> None:
    folder = FOLDERS["gptq"](tmp_path / "m", tiny_llama(num_hidden_layers=1))
    content = (folder / "model.safetensors").read_bytes()
    for damaged in (b"", content[:20], b"\xff" * 100, content[:8] + b"[" + content[9:]):
        (folder / "model.safetensors").write_bytes(damaged)
        assert stored_weights(folder) is None
    (folder / "model.safetensors").unlink()
    assert stored_weights(folder) is None and stored_weights("llama-3.1-8b") is None
