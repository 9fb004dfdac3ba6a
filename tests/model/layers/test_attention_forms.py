"""Packed, cached and windowed attention agree with plain attention on the same tokens."""

from __future__ import annotations

import pytest
import torch

from armillary.errors import BadInput
from armillary.kernels.attention.attention import AttentionOptions, reference
from armillary.model.layers.attention_forms import alibi_slopes, chosen, packed, plain
from armillary.model.transformer import build
from armillary.spec.catalogue import config_from_fields
from armillary.spec.model import ModelConfig
from tests.model.contiguous_cache import ContiguousCache


def small(**fields: object) -> ModelConfig:
    base = {
        "hidden": 32,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 8,
        "ffn": 48,
        "vocab": 50,
        "context": 64,
        "num_layers": 2,
    }
    return config_from_fields(base | fields, where="small")


def latent(*, q_rank: int | None = 10, **fields: object) -> ModelConfig:
    """DeepSeek-style: latent attention, a dense layer before experts, a shared expert, grouped routing."""
    mla = {"q_rank": q_rank or "none", "kv_rank": 16, "nope_dim": 8, "rope_dim": 4, "v_dim": 6}
    moe = {"num_experts": 4, "top_k": 2, "ffn": 16, "shared_ffn": 16, "score": "sigmoid", "selection_bias": True}
    base = {"mla": mla, "dense_first": 1, "family": "deepseek_v3"}
    return small(**base | {"rope": {"interleaved": True}, "moe": moe | {"groups": 2, "top_groups": 1}} | fields)


SHAPES = {
    "plain": small(),
    "window": small(attention_pattern=["sliding", "full"], window=5),
    "softcap": small(attention_softcap=2.0),
    "sinks": small(sinks=True),
    "alibi": small(positions="alibi", heads=4),
    "chunks, layers without rope": small(
        attention_pattern=["chunked", "full"],
        window=5,
        nope_every=2,
        query_temperature=0.5,
        temperature_floor=3,
        qk_norm="head",
        qk_norm_kind="plain",
        rope={"interleaved": True},
    ),
    "window and sinks": small(attention_pattern=["sliding"], window=4, sinks=True),
    "latent": latent(),
    "latent, full-rank queries": latent(q_rank=None),
}


def randomised(config: ModelConfig) -> torch.nn.Module:
    model = build(config, dtype=torch.float64, device="cpu", seed=1)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    return model


@pytest.mark.parametrize("name", SHAPES)
def test_packed_documents_equal_separate_ones(name: str) -> None:
    model = randomised(SHAPES[name])
    parts = [torch.randint(0, 50, (1, length)) for length in (7, 1, 12)]
    alone = [model(part, torch.arange(part.shape[1])[None], plain) for part in parts]
    documents_BT = torch.cat([torch.full_like(part, i) for i, part in enumerate(parts)], dim=1)
    positions_BT = torch.cat([torch.arange(part.shape[1])[None] for part in parts], dim=1)
    together = model(torch.cat(parts, dim=1), positions_BT, packed(documents_BT))
    torch.testing.assert_close(together, torch.cat(alone, dim=1), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", SHAPES)
def test_cache_rows_may_stand_at_different_positions(name: str) -> None:
    """Two prompts of different length, the shorter padded at its end, decode as if they were alone."""
    model = randomised(SHAPES[name])
    rows = [torch.randint(0, 50, (12,)), torch.randint(0, 50, (12,))]
    prompts = [9, 4]
    cache = ContiguousCache(model.config, batch=2, length=20, dtype=torch.float64, device="cpu")
    padded_BT = torch.zeros(2, 9, dtype=torch.long)
    for row, tokens, length in zip(padded_BT, rows, prompts, strict=True):
        row[:length] = tokens[:length]
    positions_BT = torch.arange(9).expand(2, -1)
    model(padded_BT, positions_BT, cache.at(positions_BT, upto=9))
    for step in range(3):
        at_B1 = torch.tensor([[length + step] for length in prompts])
        tokens_B1 = torch.stack(
            [tokens[length + step : length + step + 1] for tokens, length in zip(rows, prompts, strict=True)]
        )
        hidden = model(tokens_B1, at_B1, cache.at(at_B1, upto=9 + step + 1))
        for row, (tokens, length) in enumerate(zip(rows, prompts, strict=True)):
            upto = length + step + 1
            alone = model(tokens[None, :upto], torch.arange(upto)[None], plain)
            torch.testing.assert_close(hidden[row, 0], alone[0, -1], rtol=1e-10, atol=1e-10)


def test_window_counts_the_token_itself() -> None:
    """With a window of 1 a token sees only itself, so the output is its own value."""
    q, k, v = (torch.randn(1, 6, 2, 8) for _ in range(3))
    torch.testing.assert_close(plain(0, q, k, v, AttentionOptions(scale=1.0, window=1)), v)


@pytest.mark.parametrize("with_documents", [False, True])
def test_chosen_kernels_have_chunks_as_documents(with_documents: bool) -> None:
    q, k, v = (torch.randn(2, 20, 2, 8, dtype=torch.float64) for _ in range(3))
    documents_BT = torch.tensor([[0] * 3 + [1] * 17, [0] * 20]) if with_documents else None
    options = AttentionOptions(scale=1.0, chunk=6)
    right = (plain if documents_BT is None else packed(documents_BT))(0, q, k, v, options)
    torch.testing.assert_close(chosen({(None, True): reference}, documents_BT)(0, q, k, v, options), right)
    whole = plain(0, q, k, v, AttentionOptions(scale=1.0))
    assert not torch.allclose(right, whole)


def test_a_full_cache_says_so() -> None:
    cache = ContiguousCache(small(), batch=1, length=4, dtype=torch.float32, device="cpu")
    with pytest.raises(BadInput, match="5 tokens do not fit a cache of 4"):
        cache.at(torch.tensor([[4]]), upto=5)


def test_alibi_slopes_of_the_paper() -> None:
    torch.testing.assert_close(alibi_slopes(8, 8.0), torch.tensor([2.0**-i for i in range(1, 9)]))
    assert alibi_slopes(6, 8.0).shape == (6,)
