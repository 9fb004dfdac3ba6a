"""Parameter counts, component by component on models small enough to count by hand, and KV bytes."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from armillary.spec import catalogue
from armillary.spec.arithmetic.params import (
    LayerParameters,
    kv_bytes,
    kv_bytes_per_token,
    layer_parameters,
    parameters,
    state_bytes,
)
from armillary.spec.model import MLA, LayerKind, ModelConfig, MoE, Simplicial

PARTS = ("embedding", "positions", "attention", "mlp", "router", "experts", "shared", "norms", "head")


def tiny(**changes: Any) -> ModelConfig:
    """Hidden 8, 4 heads of 2 on 2 KV heads, ffn 16, vocabulary 10, three dense layers."""
    shape: dict[str, Any] = {
        "hidden": 8,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 2,
        "ffn": 16,
        "vocab": 10,
        "context": 32,
        "layers": (LayerKind(),) * 3,
    }
    return ModelConfig(**(shape | changes))


MOE = MoE(num_experts=4, top_k=2, ffn=6)


def test_a_llama_like_model() -> None:
    found = parameters(tiny())
    assert found.embedding == found.head == 10 * 8
    assert found.attention == 3 * ((4 + 2 + 2) * 2 * 8 + 8 * (4 * 2))
    assert found.mlp == 3 * (2 * 16 * 8 + 8 * 16)
    assert found.norms == (2 * 3 + 1) * 8
    assert (found.positions, found.router, found.experts, found.shared) == (0, 0, 0, 0)
    assert found.total == found.active == 80 + 80 + 576 + 1152 + 56


def test_a_gpt2_like_model() -> None:
    found = parameters(
        tiny(
            kv_heads=4,
            tied=True,
            norm="layer",
            norm_bias=True,
            gated=False,
            positions="learned",
            learned_positions=32,
            qkv_bias=True,
            out_bias=True,
            mlp_bias=True,
        )
    )
    assert found.positions == 32 * 8
    assert found.attention == 3 * (24 * 8 + 24 + 8 * 8 + 8)
    assert found.mlp == 3 * (16 * 8 + 16 + 8 * 16 + 8)
    assert found.norms == (2 * 3 + 1) * (8 + 8)
    assert found.head == 0


def test_a_tied_head_is_counted_once_but_multiplied_all_the_same() -> None:
    tied, untied = parameters(tiny(tied=True)), parameters(tiny())
    assert untied.total - tied.total == 80
    assert untied.multiplied == tied.multiplied == 576 + 1152 + 80
    assert parameters(tiny(tied=True, head_bias=True)).head == 10


def test_experts_router_and_shared_expert() -> None:
    moe = replace(MOE, shared_ffn=12, shared_gate=True, router_bias=True, expert_bias=True)
    layers = (LayerKind(), LayerKind(mlp="moe"), LayerKind(mlp="moe"))
    found = parameters(tiny(moe=moe, layers=layers))
    one_expert = 2 * 6 * 8 + 8 * 6 + 2 * 6 + 8
    assert found.mlp == 2 * 16 * 8 + 8 * 16
    assert found.router == 2 * (4 * 8 + 4)
    assert found.experts == 2 * 4 * one_expert
    assert found.shared == 2 * (2 * 12 * 8 + 8 * 12 + 8)
    assert found.total - found.active == 2 * 2 * one_expert
    assert found.multiplied == 576 + 384 + 2 * (4 * 8 + 2 * (3 * 6 * 8) + 3 * 12 * 8 + 8) + 80


def test_the_selection_bias_is_a_buffer() -> None:
    layers = (LayerKind(mlp="moe"),)
    plain, biased = tiny(moe=MOE, layers=layers), tiny(moe=replace(MOE, selection_bias=True), layers=layers)
    assert parameters(plain) == parameters(biased)


def test_latent_attention() -> None:
    full = MLA(q_rank=None, kv_rank=6, nope_dim=4, rope_dim=2, v_dim=3)
    kv_and_out = 8 * (6 + 2) + 6 * 4 * (4 + 3) + 4 * 3 * 8
    found = parameters(tiny(mla=full, layers=(LayerKind(),)))
    assert found.attention == 8 * 4 * (4 + 2) + kv_and_out
    assert found.norms == 3 * 8 + 6
    low_rank = parameters(tiny(mla=replace(full, q_rank=5), layers=(LayerKind(),)))
    assert low_rank.attention == 8 * 5 + 5 * 4 * (4 + 2) + kv_and_out
    assert low_rank.norms == 3 * 8 + 6 + 5


@pytest.mark.parametrize(
    ("changes", "norms"),
    [
        ({}, 7),
        ({"norm_at": "after"}, 7),
        ({"norm_at": "both"}, 13),
        ({"parallel": "one_norm"}, 4),
        ({"parallel": "two_norms"}, 7),
        ({"final_norm": False}, 6),
        ({"norm_weight": False, "norm": "layer"}, 0),
        ({"norm": "layer"}, 7),
        ({"norm": "layer", "norm_bias": True}, 14),
        ({"norm_bias": True}, 7),
    ],
)
def test_norms_of_hidden_size(changes: dict[str, Any], norms: int) -> None:
    assert parameters(tiny(**changes)).norms == norms * 8


@pytest.mark.parametrize(
    ("changes", "extra"),
    [
        ({"qk_norm": "head"}, 2 + 2),
        ({"qk_norm": "all"}, 4 * 2 + 2 * 2),
        ({"qk_norm": "head", "qk_norm_kind": "plain"}, 0),
        ({"qk_norm": "head", "norm": "layer", "norm_bias": True}, 2 + 2),
    ],
)
def test_norms_of_queries_and_keys(changes: dict[str, Any], extra: int) -> None:
    config = tiny(**changes)
    without = parameters(replace(config, qk_norm="none"))
    assert parameters(config).norms - without.norms == 3 * extra


def test_sinks_are_one_logit_a_head() -> None:
    assert parameters(tiny(sinks=True)).attention - parameters(tiny()).attention == 3 * 4


def test_simplicial_layers_project_two_keys_and_two_values() -> None:
    layers = (LayerKind(), LayerKind(attention="2-simplicial"))
    config = tiny(layers=layers, simplicial=Simplicial(window_1=16, window_2=4))
    plain, simplicial = layer_parameters(config, 0), layer_parameters(config, 1)
    assert simplicial.attention - plain.attention == 2 * 2 * 2 * 8
    assert simplicial.multiplied - plain.multiplied == 2 * 2 * 2 * 8


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    kv_heads, group, head_dim = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.sampled_from([2, 4]))
    flags = ("tied", "norm_bias", "norm_weight", "gated", "qkv_bias", "out_bias", "mlp_bias", "head_bias", "sinks")
    kinds = st.builds(LayerKind, attention=st.sampled_from(["full", "sliding"]), mlp=st.sampled_from(["dense", "moe"]))
    on_or_off: dict[str, Any] = {flag: draw(st.booleans()) for flag in flags}
    return ModelConfig(
        hidden=draw(st.integers(1, 9)),
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=draw(st.integers(1, 9)),
        vocab=draw(st.integers(1, 20)),
        context=64,
        window=draw(st.integers(1, 20)),
        layers=tuple(draw(st.lists(kinds, min_size=1, max_size=5))),
        moe=MoE(num_experts=draw(st.integers(2, 5)), top_k=draw(st.integers(1, 2)), ffn=draw(st.integers(1, 5))),
        norm=draw(st.sampled_from(["rms", "layer"])),
        norm_at=draw(st.sampled_from(["before", "after", "both"])),
        qk_norm=draw(st.sampled_from(["none", "head", "all"])),
        **on_or_off,
    )


@given(configs())
def test_parts_and_layers_add_up(config: ModelConfig) -> None:
    found = parameters(config)
    layers = [layer_parameters(config, i) for i in range(config.num_layers)]
    assert found.total == sum(getattr(found, part) for part in PARTS)
    assert {part.name for part in fields(found)} == {*PARTS, "total", "active", "multiplied"}
    outside = found.embedding + found.positions + found.head + parameters(config).norms - sum(x.norms for x in layers)
    assert found.total == outside + sum(layer.total for layer in layers)
    assert found.active == outside + sum(layer.active for layer in layers)
    assert found.multiplied == config.vocab * config.hidden + sum(layer.multiplied for layer in layers)
    assert all(layer.multiplied <= layer.active <= layer.total for layer in layers)


@given(configs())
def test_one_more_layer_adds_one_layer(config: ModelConfig) -> None:
    longer = replace(config, layers=(*config.layers, config.layers[0]))
    assert parameters(longer).total - parameters(config).total == layer_parameters(config, 0).total


def test_layer_parameters_name_what_they_count() -> None:
    assert layer_parameters(tiny(), 2) == LayerParameters(attention=192, mlp=384, norms=16, multiplied=576)


# --- the KV cache


@pytest.mark.parametrize(
    ("name", "num_bytes"),
    [
        ("llama-3-8b", 131_072),  # 2 · 8 heads · 128 · 32 layers · 2 bytes
        ("llama-2-7b", 524_288),
        ("llama-2-70b", 327_680),
        ("llama-3.1-405b", 516_096),
        ("falcon-7b", 8_192),  # one KV head of 64
        ("deepseek-v3", 70_272),  # (512 + 64) · 61 layers · 2 bytes
        ("gpt-oss-20b", 49_152),
        ("qwen3-next-80b-a3b", 24_576),  # 12 of 48 layers
    ],
)
def test_kv_bytes_per_token_of_known_models(name: str, num_bytes: int) -> None:
    config = catalogue.model(name).config
    assert kv_bytes_per_token(config) == num_bytes
    assert kv_bytes_per_token(config, dtype_bytes=1) == num_bytes // 2


def test_recurrent_states_do_not_grow() -> None:
    config = catalogue.model("qwen3-next-80b-a3b").config
    channels = (16 + 16 + 32) * 128
    assert state_bytes(config) == 36 * (32 * 128 * 128 * 4 + 3 * channels * 2)
    assert kv_bytes(config, 4_096) == 4_096 * 24_576
    assert state_bytes(catalogue.model("llama-3-8b").config) == 0


def test_a_sliding_cache_stops_growing_at_its_window() -> None:
    config = catalogue.model("mistral-7b-v0.1").config
    assert kv_bytes(config, 4_096) == 4_096 * 131_072
    assert kv_bytes(config, 32_768) == kv_bytes(config, 4_096)


def test_only_full_layers_grow_beyond_the_window() -> None:
    config = catalogue.model("gpt-oss-20b").config
    one_layer = 2 * 8 * 64 * 2
    assert kv_bytes(config, 131_072) == 12 * one_layer * 131_072 + 12 * one_layer * 128


def test_simplicial_caches_each_pair_within_its_window() -> None:
    config = tiny(layers=(LayerKind(attention="2-simplicial"),), simplicial=Simplicial(window_1=16, window_2=4))
    pair = 2 * 2 * 2 * 2  # key and value, 2 KV heads of 2, 2 bytes
    assert kv_bytes_per_token(config) == 2 * pair
    assert kv_bytes(config, 32) == (16 + 4) * pair


@given(configs(), st.integers(0, 80))
def test_the_cache_grows_by_at_most_one_token(config: ModelConfig, context: int) -> None:
    growth = kv_bytes(config, context + 1) - kv_bytes(config, context)
    assert 0 <= growth <= kv_bytes_per_token(config)
    assert kv_bytes(config, 0) == 0
