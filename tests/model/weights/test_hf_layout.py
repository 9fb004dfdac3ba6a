"""Fused weights: taken apart they are what they were, and a contiguous shard holds whole heads and pairs."""

from __future__ import annotations

import pytest
import torch

from armillary.model.layers.attention_forms import plain
from armillary.model.transformer import Transformer, build
from armillary.model.weights.hf_layout import rules
from armillary.model.weights.hf_weights import selection_biases
from armillary.spec.hf.config import from_hf
from tests.model.families import FAMILIES, random_config
from tests.model.layers.test_attention_forms import small


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(3))
def test_split_undoes_join(family: str, seed: int) -> None:
    config = from_hf(random_config(family, seed).to_dict(), name=family)
    with torch.device("meta"):
        model = Transformer(config)
    shapes = {name: p.shape for name, p in (dict(model.named_parameters()) | selection_biases(model)).items()}
    found = rules(config)
    assert {rule.name for rule in found} == set(shapes)
    for rule in found:
        fused = torch.randn(shapes[rule.name])
        parts = rule.split(fused)
        assert len(parts) == len(rule.hf_names)
        assert torch.equal(rule.join(parts), fused)


def test_halves_of_the_output_dim_are_a_model_of_half_the_heads() -> None:
    """The contract tensor parallelism stands on: rows [0, n/2) of qkv and of gate/up are whole heads and pairs."""
    config = small(num_layers=1)
    whole = build(config, dtype=torch.float64, device="cpu", seed=5).blocks["0"]
    x = torch.randn(1, 6, 32, dtype=torch.float64)
    sums = {"attention": 0.0, "mlp": 0.0}
    rotary = Transformer(config).rotary(torch.arange(6)[None])
    for half in range(2):
        part = Transformer(small(num_layers=1, heads=2, kv_heads=1, ffn=24)).double().blocks["0"]
        for ours, theirs in (
            (part.attention.qkv, whole.attention.qkv),
            (part.mlp.up, whole.mlp.up),
        ):
            ours.weight.data.copy_(theirs.weight.data.chunk(2)[half])
        for ours, theirs in ((part.attention.out, whole.attention.out), (part.mlp.down, whole.mlp.down)):
            ours.weight.data.copy_(theirs.weight.data.chunk(2, dim=1)[half])
        sums["attention"] = sums["attention"] + part.attention(x, rotary, plain, 0)
        sums["mlp"] = sums["mlp"] + part.mlp(x)
    torch.testing.assert_close(sums["attention"], whole.attention(x, rotary, plain, 0))
    torch.testing.assert_close(sums["mlp"], whole.mlp(x))
