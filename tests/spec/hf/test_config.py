"""config.json in and out: every family is read with its own defaults, and what is written reads back the same."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest

from armillary.errors import BadInput, BadModel
from armillary.spec import catalogue
from armillary.spec.hf.config import READERS, from_hf, to_hf
from armillary.spec.hf.writers import WRITERS
from armillary.spec.model import GatedDelta
from tests.model.families import FAMILIES, random_config, transformers

_WITHOUT_A_CLASS = {"kimi_k2", "dbrx", "gemma3", "llama4", "qwen3_5", "qwen3_5_moe", "simplicial"}
_DEFAULT_IS_EMPTY = {"deepseek_v2": {"num_experts_per_tok": 6}}
# sizes that define a model, and what transformers derives from them once they are there
_NOT_OPTIONAL = {
    "model_type",
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "d_model",
    "n_heads",
    "n_layers",
    "n_embd",
    "n_layer",
    "n_head",
    "rope_parameters",
    "layer_types",
    "moe_intermediate_size",
    "num_experts",
    "num_experts_per_tok",
    "num_local_experts",
    "n_routed_experts",
    "shared_expert_intermediate_size",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "intermediate_size_mlp",
    "no_rope_layers",
    "sliding_window",
}


def default_config(family: str) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return transformers.CONFIG_MAPPING[family]().to_dict() | _DEFAULT_IS_EMPTY.get(family, {})


@pytest.mark.parametrize("family", sorted(set(READERS) - _WITHOUT_A_CLASS))
def test_a_key_left_out_means_the_family_s_default(family: str) -> None:
    raw = default_config(family)
    whole = from_hf(raw, name=family)
    for key in sorted(set(raw) - _NOT_OPTIONAL):
        shorter = {other: value for other, value in raw.items() if other != key}
        assert from_hf(shorter, name=family) == whole, key


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(8))
def test_what_is_written_reads_back_and_transformers_agrees(family: str, seed: int) -> None:
    config = from_hf(random_config(family, seed).to_dict(), name=family)
    raw = to_hf(config)
    assert from_hf(raw, name=family) == config
    theirs = transformers.AutoConfig.for_model(**raw)
    assert from_hf(theirs.to_dict(), name=family) == config


def test_every_catalogue_model_of_a_writable_family_is_written() -> None:
    writable = [entry.config for entry in catalogue.models().values() if entry.config.family in WRITERS]
    assert len(writable) > 40
    for config in writable:
        assert from_hf(to_hf(config), name=config.name) == config


def test_old_and_new_spelling_of_rope_mean_the_same() -> None:
    sizes = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    sizes |= {"intermediate_size": 96, "vocab_size": 100}
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    old = from_hf(sizes | {"rope_theta": 5e5, "rope_scaling": scaling | {"type": "llama3"}}, name="x")
    new = from_hf(sizes | {"rope_parameters": scaling | {"rope_type": "llama3", "rope_theta": 5e5}}, name="x")
    assert old == new
    assert old.rope.scaling == "llama3" and old.rope.theta == 5e5


def test_the_text_part_of_a_multimodal_config_is_read() -> None:
    raw = {
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560,
            "num_hidden_layers": 34,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "sliding_window": 1024,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    }
    config = from_hf(raw, name="gemma-3-4b")
    assert replace(config, name="", family="") == replace(catalogue.model("gemma-3-4b").config, name="", family="")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"model_type": "lama"}, "did you mean llama"),
        ({"model_type": None}, "model_type 'None'"),
        ({"hidden_size": None}, "wrong kind|hidden"),
        ({"num_attention_heads": 3}, "KV heads do not divide"),
        ({"hidden_act": "mish"}, "activation 'mish'"),
        ({"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}, "rope type 'spiral'"),
        ({"num_hidden_layers": 0}, "num_layers=0 must be from 1"),
        ({"vocab_size": "many"}, "vocab"),
    ],
)
def test_a_wrong_config_is_one_line(change: dict[str, Any], expected: str) -> None:
    raw = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "vocab_size": 100,
        "intermediate_size": 96,
    }
    with pytest.raises(BadInput, match=expected) as caught:
        from_hf(raw | change, name="x")
    assert "\n" not in str(caught.value)


def test_a_missing_size_is_named() -> None:
    with pytest.raises(BadModel, match="lacks vocab_size"):
        from_hf({"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}, name="x")


def test_a_shape_that_its_family_cannot_say_is_refused_with_one_that_can() -> None:
    llama = catalogue.model("llama-3.1-8b").config
    with pytest.raises(BadModel, match=r"'llama' config.json cannot express .*window; try --set model.family=mistral"):
        to_hf(replace(catalogue.model("mistral-7b").config, family="llama"))
    with pytest.raises(BadModel, match=r"cannot express positions; no other can either"):
        to_hf(replace(llama, positions="alibi"))
    with pytest.raises(BadModel, match="is of a model with experts and this has none; try --set model"):
        to_hf(replace(llama, family="mixtral"))


def test_llama_4_without_experts() -> None:
    raw = {
        "model_type": "llama4_text",
        "hidden_size": 64,
        "intermediate_size": 96,
        "intermediate_size_mlp": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 100,
    }
    for dense in ({"moe_layers": []}, {"interleave_moe_layer_step": 0}):
        config = from_hf(raw | dense, name="dense")
        assert config.moe is None and {kind.mlp for kind in config.layers} == {"dense"}
    mixed = from_hf(raw | {"interleave_moe_layer_step": 2}, name="mixed")
    assert [kind.mlp for kind in mixed.layers] == ["dense", "moe", "dense", "moe"]


def test_a_hybrid_with_gated_delta_net_layers() -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4, "vocab_size": 100}
    experts = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = from_hf({"model_type": "qwen3_next"} | sizes | experts, name="mine")
    assert [kind.attention for kind in config.layers] == (["gated_delta"] * 3 + ["full"]) * 2
    assert config.gated_delta == GatedDelta(key_heads=16, value_heads=32, key_dim=128, value_dim=128)
    assert config.moe is not None and config.moe.shared_gate and config.num_recurrent_layers == 6
    assert config.attention_gate and config.norm_plus_one and config.rope.fraction == 0.25
    dense = from_hf({"model_type": "qwen3_5", "text_config": sizes | {"intermediate_size": 96}}, name="mine")
    assert dense.moe is None and dense.ffn == 96 and dense.num_recurrent_layers == 6


@pytest.mark.parametrize(("family", "layers"), [("mamba2", "Mamba"), ("jamba", "Mamba")])
def test_families_with_other_recurrent_layers_are_refused_by_name(family: str, layers: str) -> None:
    with pytest.raises(BadModel, match=f"a '{family}' model has {layers} layers.*take a family of docs/models.md"):
        from_hf({"model_type": family, "hidden_size": 64}, name="mine")
