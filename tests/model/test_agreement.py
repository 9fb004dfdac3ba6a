"""Our module gives transformers' logits: full forward, cached decode, and after a round trip through a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from armillary.model.layers.attention_forms import plain
from armillary.model.transformer import Transformer
from armillary.model.weights.hf_weights import load_model, save_model
from tests.model.contiguous_cache import ContiguousCache
from tests.model.families import FAMILIES, random_model, transformers

CASES = [
    pytest.param(family, seed, marks=[pytest.mark.slow] * (seed != place % 2))
    for place, family in enumerate(FAMILIES)
    for seed in range(6)
]
"""by default a long and a short text for each family"""
TOLERANCE = 1e-5
RECURRENT = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Compared relative to the norm of all logits: norms of the small outputs of their recurrent layers enlarge rounding,
so that single logits of transformers itself are up to 7e-5 from fp64."""


@pytest.mark.parametrize(("family", "seed"), CASES)
def test_logits_equal_transformers(family: str, seed: int, tmp_path: Path) -> None:
    compare(random_model(family, seed), family, seed, tmp_path)


@torch.no_grad()
def compare(theirs: Any, family: str, seed: int, tmp_path: Path) -> None:
    """Full forward, prefill and single steps, and transformers on what we exported, all against transformers."""
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load_model(tmp_path / "theirs")
    length = 40 if seed % 2 else 80  # beyond some contexts, so that length-dependent rope rules switch
    generator = torch.Generator().manual_seed(seed)
    tokens_BT = torch.randint(0, theirs.config.vocab_size, (2, length), generator=generator)
    expected = theirs(tokens_BT, use_cache=False).logits
    close = assert_close_in_norm if family in RECURRENT else assert_close
    close(full_logits(ours, tokens_BT), expected)
    close(cached_logits(ours, tokens_BT, prompt=17), their_cached_logits(theirs, tokens_BT, prompt=17))

    save_model(ours, tmp_path / "back")
    back = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "back", attn_implementation="eager", experts_implementation="eager"
    )
    assert back.config.model_type == family
    close(back.eval()(tokens_BT, use_cache=False).logits, expected)


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.shape == theirs.shape
    difference = (ours - theirs).abs().max().item()
    assert difference <= TOLERANCE, f"max abs diff {difference:.2e}"


def assert_close_in_norm(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    difference = ((ours - theirs).norm() / theirs.norm()).item()
    assert difference <= TOLERANCE, f"relative difference {difference:.2e}"


def full_logits(model: Transformer, tokens_BT: torch.Tensor) -> torch.Tensor:
    positions_BT = torch.arange(tokens_BT.shape[1]).expand_as(tokens_BT)
    return model.head(model(tokens_BT, positions_BT, plain))


def cached_logits(model: Transformer, tokens_BT: torch.Tensor, *, prompt: int) -> torch.Tensor:
    """Prefill `prompt` tokens, then one token at a time."""
    batch, length = tokens_BT.shape
    cache = ContiguousCache(model.config, batch=batch, length=length, dtype=torch.float32, device="cpu")
    spans = [(0, prompt)] + [(i, i + 1) for i in range(prompt, length)]
    pieces = []
    for start, stop in spans:
        positions_BT = torch.arange(start, stop).expand(batch, -1)
        hidden = model(tokens_BT[:, start:stop], positions_BT, cache.at(positions_BT, upto=stop))
        pieces.append(model.head(hidden))
    return torch.cat(pieces, dim=1)


def their_cached_logits(model: torch.nn.Module, tokens_BT: torch.Tensor, *, prompt: int) -> torch.Tensor:
    out = model(tokens_BT[:, :prompt], use_cache=True)
    pieces, cache = [out.logits], out.past_key_values
    for i in range(prompt, tokens_BT.shape[1]):
        out = model(tokens_BT[:, i : i + 1], past_key_values=cache, use_cache=True)
        pieces.append(out.logits)
        cache = out.past_key_values
    return torch.cat(pieces, dim=1)


ODD = {
    "a fraction that the family does not use": (
        "llama",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    "no layer slides": ("gemma2", {"layer_types": ["full_attention"] * 3, "num_hidden_layers": 3}),
    "longrope outside phi3": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "factor": 3.0,
                "short_factor": [1.1] * 4,
                "long_factor": [2.2] * 4,
                "original_max_position_embeddings": 20,
            },
            "head_dim": 8,
        },
    ),
    "longrope with an attention factor": (
        "phi3",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "attention_factor": 1.3,
                "head_dim": 8,
                "short_factor": [1.1] * 4,
                "long_factor": [2.2] * 4,
            },
            "head_dim": 8,
            "original_max_position_embeddings": 20,
            "max_position_embeddings": 80,
        },
    ),
    "yarn with everything": (
        "qwen3",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "beta_fast": 20.0,
                "beta_slow": 2.0,
                "attention_factor": 1.2,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "every expert": ("mixtral", {"num_local_experts": 3, "num_experts_per_tok": 3}),
    "one expert": ("qwen3_moe", {"num_experts": 1, "num_experts_per_tok": 1, "mlp_only_layers": []}),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_configs(name: str, tmp_path: Path) -> None:
    family, changes = ODD[name]
    compare(random_model(family, 3, **changes), family, 4, tmp_path)
