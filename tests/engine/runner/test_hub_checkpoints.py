"""Published quantized checkpoints, one per format, against transformers: `make test-hub`, with internet access.

A format whose package transformers needs and does not find (GPTQ and AWQ: gptqmodel) is skipped, by name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from armillary.model.quantized.packed_linear import loaded_bytes, packed_modules
from armillary.model.weights.hf_weights import load_model
from armillary.store.home import Home
from armillary.store.resolve_model import resolve_model
from armillary.store.stored_weights import stored_weights
from tests.model.quantized.folders import FOLDERS, tiny_llama
from tests.model.test_agreement import full_logits

CHECKPOINTS = {
    "fp8 blocks": ("Qwen/Qwen3-0.6B-FP8", ""),
    "compressed-tensors int4": ("RedHatAI/Qwen3-0.6B-quantized.w4a16", ""),
    "gptq": ("Qwen/Qwen2.5-0.5B-Instruct-GPTQ-Int4", ""),
    "awq": ("Qwen/Qwen2.5-0.5B-Instruct-AWQ", ""),
    "bitsandbytes nf4": ("unsloth/Qwen2.5-0.5B-Instruct-bnb-4bit", ""),
    "gguf": ("Qwen/Qwen2.5-0.5B-Instruct-GGUF", "qwen2.5-0.5b-instruct-q4_k_m.gguf"),
}


def theirs_of(source: str, file: str) -> Any:
    """The model as transformers reads it, in fp32."""
    named = {"gguf_file": file} if file else {}
    try:
        return transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **named).eval()
    except ImportError as error:
        pytest.skip(f"transformers cannot read {source}: {str(error).splitlines()[0]}")


@torch.no_grad()
def compare(source: str, theirs: Any, home: Home) -> None:
    """Logits within 2 % in norm, the likeliest token the same at 9 of 10 positions, and no more memory than the file.
    (Some packages compute in 16 bits whatever the dtype.)"""
    folder = resolve_model(source, home, need_weights=True).folder
    assert folder is not None
    model, stored = load_model(folder, dtype="fp32", packed=True), stored_weights(folder)
    assert stored is not None and packed_modules(model)
    assert loaded_bytes(model) <= 1.05 * stored.loaded_bytes(4)
    tokens = torch.randint(0, min(model.config.vocab, 50_000), (1, 40), generator=torch.Generator().manual_seed(0))
    ours, expected = full_logits(model, tokens), theirs(tokens, use_cache=False).logits.float()
    expected = expected[..., : ours.shape[-1]]
    assert (ours - expected).norm() <= 0.02 * expected.norm()
    assert (ours.argmax(-1) == expected.argmax(-1)).float().mean() >= 0.9


@pytest.mark.hub
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_published(name: str, tmp_path: Path) -> None:
    source, file = CHECKPOINTS[name]
    theirs = theirs_of(source, file)
    if file:
        from huggingface_hub import hf_hub_download

        source = hf_hub_download(source, file)
    compare(source, theirs, Home.at(tmp_path))


def test_the_comparison_holds_and_fails(tmp_path: Path) -> None:
    """On a folder made here, in place of a published one."""
    folder = FOLDERS["fp8 per row"](tmp_path / "m", tiny_llama(num_hidden_layers=1))
    theirs = theirs_of(str(folder), "")
    compare(str(folder), theirs, Home.at(tmp_path))
    with torch.no_grad():
        theirs.lm_head.weight.add_(0.05)
    with pytest.raises(AssertionError):
        compare(str(folder), theirs, Home.at(tmp_path))
