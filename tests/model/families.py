"""Random small Hugging Face configs of every family we exchange weights with, drawn from a seed."""

from __future__ import annotations

import random
from typing import Any

import transformers

_ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu")
FAMILIES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "mixtral",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "glm4_moe",
    "gpt_oss",
    "llama4_text",
    "deepseek_v2",
    "deepseek_v3",
    "phi3",
    "gemma",
    "gemma2",
    "olmo2",
)
GATED = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""families with gated layers, which take no adapters and are not quantized"""
_CLASSES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "mixtral": "Mixtral",
    "qwen3_moe": "Qwen3Moe",
    "qwen3_next": "Qwen3Next",
    "qwen3_5_text": "Qwen3_5Text",
    "qwen3_5_moe_text": "Qwen3_5MoeText",
    "glm4_moe": "Glm4Moe",
    "gpt_oss": "GptOss",
    "llama4_text": "Llama4Text",
    "deepseek_v2": "DeepseekV2",
    "deepseek_v3": "DeepseekV3",
    "phi3": "Phi3",
    "gemma": "Gemma",
    "gemma2": "Gemma2",
    "olmo2": "Olmo2",
}


def random_config(family: str, seed: int, **changes: Any) -> Any:
    """A transformers config: shapes, biases, tying, rope rule and windows all vary with the seed; then `changes`."""
    pick = random.Random(f"{family}/{seed}")
    kv_heads, group = pick.choice([(1, 4), (2, 2), (4, 1), (2, 3), (3, 1)])
    head_dim = pick.choice([8, 16, 24])
    heads = kv_heads * group
    fields: dict[str, Any] = {
        "vocab_size": pick.choice([61, 128, 257]),
        "hidden_size": heads * head_dim if family in ("olmo2", "phi3") else pick.choice([heads * head_dim, 48]),
        "intermediate_size": pick.choice([33, 64, 96]),
        "num_hidden_layers": pick.choice([1, 2, 3, 5]),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": pick.choice([64, 128]),
        "rms_norm_eps": pick.choice([1e-5, 1e-6]),
        "tie_word_embeddings": pick.random() < 0.5,
        ("hidden_activation" if family == "gemma2" else "hidden_act"): pick.choice(
            _ACTIVATIONS if family != "gemma" else ("silu", "gelu_pytorch_tanh")  # releases disagree on its gelu
        ),
        "rope_parameters": _rope(pick, family, head_dim),
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    fields |= _EXTRA[family](pick, fields) | changes
    config = getattr(transformers, f"{_CLASSES[family]}Config")(**fields)
    config._attn_implementation = "eager"  # soft caps are only there
    config._experts_implementation = "eager"  # the grouped one refuses odd sizes
    return config


def random_model(family: str, seed: int, **changes: Any) -> Any:
    """A transformers model in fp32 with weights large enough that a mix-up shows."""
    import torch

    config = random_config(family, seed, **changes)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            wide = 0.3 if "norm" in name else 0.08
            parameter.add_(torch.randn_like(parameter) * wide)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(torch.randn_like(buffer) * 0.1)
    return model.eval()


def _rope(pick: random.Random, family: str, head_dim: int) -> dict[str, Any]:
    theta = {"rope_theta": pick.choice([10_000.0, 500_000.0])}
    if family in ("gemma", "gemma2"):
        return theta | {"rope_type": "default"}
    rules = ["default", "longrope"] if family == "phi3" else ["default", "linear", "dynamic", "llama3", "yarn"]
    rule = pick.choice(rules)
    if rule == "default":
        partial = {"partial_rotary_factor": 0.75} if family == "phi3" and head_dim == 16 else {}
        return theta | {"rope_type": "default"} | partial
    if rule in ("linear", "dynamic"):
        return theta | {"rope_type": rule, "factor": 2.0}
    if rule == "llama3":
        extra = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
        return theta | {"rope_type": rule, "factor": 8.0} | extra
    if rule == "yarn" and family.startswith("deepseek"):
        extra = pick.choice([{}, {"mscale": 0.707, "mscale_all_dim": 0.707}, {"mscale": 1.0, "mscale_all_dim": 0.5}])
        return theta | {"rope_type": rule, "factor": 4.0, "original_max_position_embeddings": 16} | extra
    if rule == "yarn":
        return theta | {"rope_type": rule, "factor": 4.0, "original_max_position_embeddings": 16}
    factors = {
        key: [round(pick.uniform(1, 3), 3) for _ in range(head_dim // 2)] for key in ("short_factor", "long_factor")
    }
    return theta | {"rope_type": rule, "original_max_position_embeddings": 20} | factors


def _bias(pick: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    return {"attention_bias": pick.random() < 0.5}


def _llama(pick: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    return _bias(pick, fields) | {"mlp_bias": pick.random() < 0.5}


def _window(pick: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    return {"sliding_window": pick.choice([None, 5, 9])}


def _qwen(pick: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    slides = pick.random() < 0.5
    extra = {"use_sliding_window": slides, "sliding_window": 6 if slides else None}
    return extra | {"max_window_layers": pick.randint(0, fields["num_hidden_layers"])}


def _mixtral(pick: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    return _window(pick, fields) | {
        "num_local_experts": pick.choice([2, 4, 5]),
        "num_experts_per_tok": pick.choice([1, 2]),
    }


def _qwen3_moe(pick: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    slides = pick.random() < 0.3
    dense = [0] if fields["num_hidden_layers"] > 1 and pick.random() < 0.4 else []
    return _bias(pick, fields) | {
        "use_sliding_window": slides,
        "sliding_window": 6 if slides else None,
        "moe_intermediate_size": pick.choice([17, 32]),
        "num_experts": pick.choice([4, 6]),
        "num_experts_per_tok": pick.choice([1, 2, 3]),
        "mlp_only_layers": dense,
        "norm_topk_prob": pick.random() < 0.5,
        "decoder_sparse_step": pick.choice([1, 2]),
    }


def _gated_delta(pick: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    """Both kinds of layers in any order, the last one with attention or not."""
    key_heads, values = pick.choice([(1, 3), (2, 1), (2, 2), (4, 1)])
    layers = max(2, fields["num_hidden_layers"])
    kinds = [
        "linear_attention",
        "full_attention",
        *(pick.choice(["linear_attention", "linear_attention", "full_attention"]) for _ in range(layers - 2)),
    ]
    pick.shuffle(kinds)
    fields["rope_parameters"] |= {"partial_rotary_factor": pick.choice([0.25, 0.5])}
    return _bias(pick, fields) | {
        "hidden_act": "silu",  # of the convolution, too
        "head_dim": pick.choice([16, 24]),
        "num_hidden_layers": layers,
        "layer_types": kinds,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * values,
        "linear_key_head_dim": pick.choice([12, 16]),
        "linear_value_head_dim": pick.choice([8, 16, 20]),
        "linear_conv_kernel_dim": pick.choice([2, 4]),
    }


def _qwen3_5_moe(pick: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    return _gated_delta(pick, fields) | {
        "moe_intermediate_size": pick.choice([17, 32]),
        "shared_expert_intermediate_size": pick.choice([20, 24]),
        "num_experts": pick.choice([4, 6]),
        "num_experts_per_tok": pick.choice([1, 2, 3]),
    }


def _qwen3_next(pick: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    return _qwen3_5_moe(pick, fields) | {
        "mlp_only_layers": [0] if pick.random() < 0.4 else [],
        "norm_topk_prob": pick.random() < 0.5,
        "decoder_sparse_step": pick.choice([1, 2]),
    }


def _glm4_moe(pick: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    groups = pick.choice([1, 2])
    fields["rope_parameters"] |= {"partial_rotary_factor": pick.choice([0.5, 1.0])}
    return _bias(pick, fields) | {
        "moe_intermediate_size": pick.choice([17, 32]),
        "n_routed_experts": 6,
        "num_experts_per_tok": pick.choice([1, 2, 3]),
        "n_shared_experts": pick.choice([1, 2]),
        "first_k_dense_replace": pick.choice([0, 1]) if fields["num_hidden_layers"] > 1 else 0,
        "norm_topk_prob": pick.random() < 0.5,
        "routed_scaling_factor": pick.choice([1.0, 2.5]),
        "n_group": groups,
        "topk_group": 1,
        "use_qk_norm": pick.random() < 0.5,
    }


def _gpt_oss(pick: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    if fields["rope_parameters"]["rope_type"] == "yarn":
        fields["rope_parameters"]["truncate"] = False  # as published
    layers = fields["num_hidden_layers"]
    return {
        "hidden_act": "silu",
        "attention_bias": pick.random() < 0.8,
        "num_local_experts": pick.choice([4, 6]),
        "num_experts_per_tok": pick.choice([1, 2, 4]),
        "sliding_window": pick.choice([5, 9]),
        "layer_types": [("sliding_attention", "full_attention")[i % 2] for i in range(layers)],
    }


def _llama4(pick: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    layers = fields["num_hidden_layers"]
    step = pick.choice([1, 2]) if layers > 1 else 1
    return {
        "hidden_act": "silu",
        "intermediate_size_mlp": pick.choice([40, 56]),
        "num_local_experts": pick.choice([2, 4]),
        "num_experts_per_tok": pick.choice([1, 1, 2]),
        "interleave_moe_layer_step": step,
        "no_rope_layer_interval": pick.choice([2, 4]),
        "attention_chunk_size": pick.choice([7, 16]),
        "use_qk_norm": pick.random() < 0.7,
        "attn_temperature_tuning": pick.random() < 0.7,
        "floor_scale": pick.choice([5, 11]),
        "attn_scale": pick.choice([0.1, 0.3]),
        "attention_bias": pick.random() < 0.3,
    }


def _deepseek(pick: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    heads, groups, rope_dim = fields["num_attention_heads"], pick.choice([1, 2, 3]), pick.choice([4, 8])
    return _bias(pick, fields) | {
        "num_key_value_heads": heads,
        "hidden_size": heads * 8,
        "q_lora_rank": pick.choice([None, 12, 20]),
        "kv_lora_rank": pick.choice([16, 24]),
        "qk_nope_head_dim": pick.choice([8, 12]),
        "qk_rope_head_dim": rope_dim,
        "head_dim": rope_dim,
        "v_head_dim": pick.choice([6, 8, 16]),
        "moe_intermediate_size": pick.choice([17, 32]),
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "n_shared_experts": pick.choice([1, 2]),
        "first_k_dense_replace": pick.choice([0, 1]) if fields["num_hidden_layers"] > 1 else 0,
        "routed_scaling_factor": pick.choice([1.0, 2.5]),
        "n_group": groups,
        "topk_group": pick.randint(1, groups),
    }


def _deepseek_v2(pick: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    return _deepseek(pick, fields) | {"topk_method": pick.choice(["greedy", "group_limited_greedy"])}


def _deepseek_v3(pick: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    extra = {"norm_topk_prob": pick.random() < 0.5, "rope_interleave": pick.random() < 0.7}
    return _deepseek(pick, fields) | extra


def _gemma2(pick: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    return _bias(pick, fields) | {
        "query_pre_attn_scalar": pick.choice([8, 24, 100]),
        "attn_logit_softcapping": pick.choice([None, 2.0, 50.0]),
        "final_logit_softcapping": pick.choice([None, 3.0, 30.0]),
        "sliding_window": pick.choice([4, 7]),
    }


_EXTRA: dict[str, Any] = {
    "llama": _llama,
    "mistral": _window,
    "qwen2": _qwen,
    "qwen3": lambda p, f: _qwen(p, f) | _bias(p, f),
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "qwen3_next": _qwen3_next,
    "qwen3_5_text": _gated_delta,
    "qwen3_5_moe_text": _qwen3_5_moe,
    "glm4_moe": _glm4_moe,
    "gpt_oss": _gpt_oss,
    "llama4_text": _llama4,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "phi3": _window,
    "gemma": _bias,
    "gemma2": _gemma2,
    "olmo2": _bias,
}
