"""A quantized model takes no more memory than its file, in every format: nothing is dequantised on the way."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from armillary.model.quantized.packed_linear import loaded_bytes, packed_modules
from armillary.model.weights.hf_weights import load_model
from armillary.store.gguf.local_folder import gguf_folder
from armillary.store.home import Home
from tests.model.quantized.folders import FOLDERS, SCHEMES, compressed, tiny_llama
from tests.model.weights.test_gguf_weights import Q, write_gguf

WIDE = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 1, "vocab_size": 32, "head_dim": 128}


@pytest.mark.parametrize("name", [*FOLDERS, *(name for name in SCHEMES if name not in FOLDERS)])
@torch.no_grad()
def test_folders(name: str, tmp_path: Path) -> None:
    write = FOLDERS.get(name) or compressed(name)
    folder = write(tmp_path, tiny_llama(**WIDE))
    model = load_model(folder, packed=True)
    assert len(packed_modules(model)) == 4
    held = loaded_bytes(model)
    assert 0.9 < held / (folder / "model.safetensors").stat().st_size <= 1.05


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K"])
@torch.no_grad()
def test_gguf(kind: str, tmp_path: Path) -> None:
    ends = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "embed_tokens", "lm_head")
    path = write_gguf(tmp_path / "m.gguf", tiny_llama(**WIDE), "llama", dict.fromkeys(ends, Q[kind]))
    model = load_model(gguf_folder(path, Home.at(tmp_path)), packed=True)
    assert 0.9 < loaded_bytes(model) / path.stat().st_size <= 1.05
