"""The model catalogue: published totals, layer patterns, and the same shapes built by transformers."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from armillary.errors import BadInput, NotFound
from armillary.spec import catalogue
from armillary.spec.arithmetic.params import parameters
from armillary.spec.model import ModelConfig

EXACT = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "pythia-160m": 162_322_944,
    "pythia-1b": 1_011_781_632,
    "pythia-6.9b": 6_857_302_016,
    "pythia-12b": 11_846_072_320,
    "gpt-neox-20b": 20_554_567_680,
    "gpt-j-6b": 6_050_882_784,
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-33b": 32_528_943_616,
    "llama-65b": 65_285_660_672,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "codellama-34b": 33_743_970_304,
    "tinyllama-1.1b": 1_100_048_384,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.3-70b": 70_553_706_496,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "smollm3-3b": 3_075_098_624,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "mistral-nemo-12b": 12_247_782_400,
    "mistral-small-3-24b": 23_572_403_200,
    "mistral-large-2-123b": 122_610_069_504,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "gemma-3-1b": 999_885_952,
    "phi-1.5": 1_418_270_720,
    "phi-2": 2_779_683_840,
    "phi-3-mini-4k": 3_821_079_552,
    "phi-3.5-mini": 3_821_079_552,
    "phi-3-medium-4k": 13_960_238_080,
    "phi-4": 14_659_507_200,
    "phi-4-mini": 3_836_021_760,
    "olmo-7b": 6_888_095_744,
    "olmo-2-1b": 1_484_916_736,
    "olmo-2-7b": 7_298_617_344,
    "olmo-2-13b": 13_716_198_400,
    "olmo-2-32b": 32_234_279_936,
    "olmoe-1b-7b": 6_919_161_856,
    "mpt-7b": 6_649_286_656,
    "falcon-7b": 6_921_720_704,
    "falcon-40b": 41_303_293_952,
    "mistral-7b-v0.2": 7_241_732_096,
}

# published total, and what the count that was published has beyond ours
EXACT_WITH_MORE = {
    "falcon-180b": (179_522_565_120, 65_024 * 14_848),  # the tied projection, stored once more
    "deepseek-v3": (671_026_419_200, 58 * 256),  # the selection biases, buffers here
    "kimi-k2": (1_026_408_232_448, 60 * 384),
    "llama-4-scout": (108_641_793_536, 871_932_416),  # the vision part
    "llama-4-maverick": (401_583_781_376, 871_932_416),
    "gemma-3-4b": (3_880_099_328, -64 * 2560),  # counted with 262,144 vocabulary rows; config.json has 64 more
    "gemma-3-12b": (11_765_788_416, -64 * 3840),
    "gemma-3-27b": (27_009_002_240, -64 * 5376),
}

# billions: total, half a unit of its last digit
ROUNDED = {
    "gpt3-175b": (174.6, 0.05),
    "deepseek-v3": (671, 0.5),
    "qwen3-coder-480b-a35b": (480, 0.5),
    "llama-4-maverick": (401, 0.5),
    "mpt-30b": (30, 0.5),
    "dbrx": (132, 0.5),
    "falcon-180b": (179, 0.5),
    "kimi-k2": (1_030, 5),
    "stablelm-base-alpha-3b": (3.64, 0.005),
}
ROUNDED_ACTIVE = {
    "mixtral-8x7b": (12.9, 0.05),
    "mixtral-8x22b": (39, 0.5),
    "deepseek-v2": (21, 0.5),
    "deepseek-v3": (37, 0.6),  # 37.55 with the embedding, 36.6 without
    "kimi-k2": (32.9, 0.05),
    "qwen1.5-moe-a2.7b": (2.7, 0.05),
    "qwen3-30b-a3b": (3.3, 0.06),
    "qwen3-235b-a22b": (22, 0.5),
    "qwen3-coder-480b-a35b": (35, 0.5),
    "llama-4-scout": (17, 0.5),
    "llama-4-maverick": (17, 0.5),
    "olmoe-1b-7b": (1.3, 0.05),
    "dbrx": (36, 0.5),
}
# makers who count active parameters without the embedding
ROUNDED_MULTIPLIED = {"gpt-oss-20b": (3.61, 0.005), "gpt-oss-120b": (5.13, 0.005), "deepseek-v2-lite": (2.4, 0.06)}


@pytest.mark.parametrize("name", EXACT)
def test_exact_totals(name: str) -> None:
    assert parameters(catalogue.model(name).config).total == EXACT[name]


@pytest.mark.parametrize("name", EXACT_WITH_MORE)
def test_exact_totals_of_checkpoints_that_hold_more(name: str) -> None:
    published, more = EXACT_WITH_MORE[name]
    assert parameters(catalogue.model(name).config).total == published - more


@pytest.mark.parametrize("name", ROUNDED)
def test_rounded_totals(name: str) -> None:
    billions, rounding = ROUNDED[name]
    assert parameters(catalogue.model(name).config).total / 1e9 == pytest.approx(billions, abs=rounding)


@pytest.mark.parametrize("name", ROUNDED_ACTIVE)
def test_active_parameters(name: str) -> None:
    billions, rounding = ROUNDED_ACTIVE[name]
    assert parameters(catalogue.model(name).config).active / 1e9 == pytest.approx(billions, abs=rounding)


@pytest.mark.parametrize("name", ROUNDED_MULTIPLIED)
def test_multiplied_parameters(name: str) -> None:
    billions, rounding = ROUNDED_MULTIPLIED[name]
    assert parameters(catalogue.model(name).config).multiplied / 1e9 == pytest.approx(billions, abs=rounding)


def test_what_the_catalogue_says_was_published_is_what_it_counts() -> None:
    """An exact figure in published_parameters is the computed total; every one of them is asserted above."""
    for name, entry in catalogue.models().items():
        stated = re.match(r"\d{1,3}(,\d{3}){2,}(?=$|;)", entry.published_parameters)
        assert (name in EXACT) == (stated is not None)
        if stated:
            assert int(stated.group().replace(",", "")) == parameters(entry.config).total


# --- the file


def test_the_catalogue_is_wide_and_sourced() -> None:
    entries = catalogue.models()
    public = {name: entry for name, entry in entries.items() if not name.startswith("armillary-")}
    assert len(public) >= 45
    for name, entry in public.items():
        assert entry.title and entry.source and entry.published_parameters, name
        assert entry.hub or name == "gpt3-175b"
        assert name == name.lower() and entry.config.name == name


def test_names_and_aliases_are_one_namespace() -> None:
    entries = catalogue.models()
    names = Counter([*entries, *(alias for entry in entries.values() for alias in entry.aliases)])
    assert [name for name, count in names.items() if count > 1] == []
    assert catalogue.model("deepseek-r1").config.name == "deepseek-v3"
    assert catalogue.model(" Llama-3-8B ").config.name == "llama-3-8b"


def test_the_file_states_only_what_differs_from_the_defaults() -> None:
    table = tomllib.loads((Path(catalogue.__file__).parent / "models.toml").read_text())
    defaults = {field.name: field.default for field in fields(ModelConfig) if field.name != "family"}
    for name, row in table.items():
        assert row["num_layers"] == catalogue.model(name).config.num_layers
        assert [key for key, value in row.items() if key in defaults and value == defaults[key]] == [], name


def test_an_unknown_model_offers_the_nearest() -> None:
    message = r"no model 'lama-3-8b'; did you mean llama-3-8b\? \(armillary models lists \d+\)"
    with pytest.raises(NotFound, match=message):
        catalogue.model("lama-3-8b")


def test_fields_are_checked() -> None:
    with pytest.raises(BadInput, match="unknown key 'hiden' in mine; did you mean hidden"):
        catalogue.config_from_fields({"num_layers": 2, "hiden": 8}, where="mine")
    with pytest.raises(BadInput, match="mine lacks num_layers"):
        catalogue.config_from_fields({"hidden": 8}, where="mine")


# --- shapes that are easy to get wrong


def kinds(name: str, field: str) -> list[Any]:
    return [getattr(kind, field) for kind in catalogue.model(name).config.layers]


def test_attention_patterns() -> None:
    assert kinds("gemma-2-9b", "attention") == ["sliding", "full"] * 21
    assert kinds("gemma-3-1b", "attention")[:7] == ["sliding"] * 5 + ["full", "sliding"]
    assert Counter(kinds("gemma-3-27b", "attention")) == {"sliding": 52, "full": 10}
    assert set(kinds("mistral-7b-v0.1", "attention")) == {"sliding"}
    assert set(kinds("mistral-7b-v0.3", "attention")) == {"full"}
    assert kinds("llama-4-scout", "attention")[:4] == ["chunked", "chunked", "chunked", "full"]


def test_layers_without_rotary_positions() -> None:
    assert [i for i, rope in enumerate(kinds("smollm3-3b", "rope")) if not rope] == list(range(3, 36, 4))
    pairs = {(kind.attention, kind.rope) for kind in catalogue.model("llama-4-maverick").config.layers}
    assert pairs == {("chunked", True), ("full", False)}


def test_layers_with_experts() -> None:
    assert kinds("deepseek-v3", "mlp") == ["dense"] * 3 + ["moe"] * 58
    assert kinds("llama-4-maverick", "mlp") == ["dense", "moe"] * 24
    assert set(kinds("llama-4-scout", "mlp")) == {"moe"}


def test_scales() -> None:
    gemma = catalogue.model("gemma-2-27b").config
    assert gemma.scale == pytest.approx(144**-0.5) and gemma.head_dim == 128
    assert gemma.embedding_scale == pytest.approx(4608**0.5)
    assert catalogue.model("gemma-3-27b").config.scale == pytest.approx(168**-0.5)
    assert catalogue.model("llama-3-8b").config.scale == pytest.approx(128**-0.5)
    assert catalogue.model("phi-2").config.rotary_dim == 32
    assert catalogue.model("deepseek-v3").config.scale == pytest.approx(192**-0.5 * 1.3688879454**2)


def test_long_rope_has_one_factor_a_frequency() -> None:
    for name in ("phi-3.5-mini", "phi-4-mini"):
        config = catalogue.model(name).config
        assert len(config.rope.short_factors) == len(config.rope.long_factors) == config.rotary_dim // 2


def test_our_presets() -> None:
    for name in ("2m", "5m", "25m", "125m", "1b"):
        size = parameters(catalogue.model(f"armillary-{name}").config).total
        said = float(name[:-1]) * (1e9 if name.endswith("b") else 1e6)
        assert size == pytest.approx(said, rel=0.15)
    assert parameters(catalogue.model("armillary-1b").config).total == 1_137_772_544
    medium = catalogue.model("armillary-25m").config
    assert (medium.kv_heads, medium.vocab) == (8, 8192)
    assert all(size % 4 == 0 for size in (medium.heads, medium.kv_heads, medium.ffn, medium.num_layers))


# --- the same shapes, built by transformers

LATENT = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
CUT: dict[str, tuple[int, str, dict[str, Any]]] = {  # catalogue name -> (layers kept, model_type, its config.json)
    "llama-3.2-1b": (
        2,
        "llama",
        {
            "hidden_size": 2048,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "intermediate_size": 8192,
            "vocab_size": 128256,
            "tie_word_embeddings": True,
        },
    ),
    "qwen2.5-0.5b": (
        2,
        "qwen2",
        {
            "hidden_size": 896,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "intermediate_size": 4864,
            "vocab_size": 151936,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-0.6b": (
        2,
        "qwen3",
        {
            "hidden_size": 1024,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 3072,
            "vocab_size": 151936,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-30b-a3b": (
        2,
        "qwen3_moe",
        {
            "hidden_size": 2048,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "vocab_size": 151936,
        },
    ),
    "gemma-2-2b": (
        2,
        "gemma2",
        {
            "hidden_size": 2304,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "intermediate_size": 9216,
            "vocab_size": 256000,
        },
    ),
    "olmo-2-7b": (
        2,
        "olmo2",
        {
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "intermediate_size": 11008,
            "vocab_size": 100352,
            "tie_word_embeddings": False,
        },
    ),
    "phi-2": (
        2,
        "phi",
        {"hidden_size": 2560, "num_attention_heads": 32, "intermediate_size": 10240, "vocab_size": 51200},
    ),
    "gpt2": (2, "gpt2", {"n_embd": 768, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}),
    "falcon-40b": (
        2,
        "falcon",
        {
            "hidden_size": 8192,
            "num_attention_heads": 128,
            "num_kv_heads": 8,
            "new_decoder_architecture": True,
            "vocab_size": 65024,
        },
    ),
    "gpt-oss-20b": (
        2,
        "gpt_oss",
        {
            "hidden_size": 2880,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "intermediate_size": 2880,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "vocab_size": 201088,
            "attention_bias": True,
        },
    ),
    "deepseek-v3": (
        4,
        "deepseek_v3",
        {
            "hidden_size": 7168,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 3,
            "vocab_size": 129280,
            **LATENT,
        },
    ),
    "llama-4-maverick": (
        2,
        "llama4_text",
        {
            "hidden_size": 5120,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 8192,
            "intermediate_size_mlp": 16384,
            "num_local_experts": 128,
            "interleave_moe_layer_step": 2,
            "vocab_size": 202048,
            "pad_token_id": None,
        },
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CUT)
def test_transformers_builds_as_many(name: str) -> None:
    import torch
    import transformers

    num_layers, family, raw = CUT[name]
    depth = {"n_layer" if family == "gpt2" else "num_hidden_layers": num_layers}
    hf_config = transformers.AutoConfig.for_model(family, **raw, **depth)
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(hf_config)
    built = sum(parameter.numel() for parameter in module.parameters())
    assert parameters(catalogue.model(name).config.with_layers(num_layers)).total == built
