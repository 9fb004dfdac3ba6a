"""Readers of families with experts: from a raw config.json to the ModelConfig fields that differ.

Defaults that files leave out are in defaults.toml.
"""

from collections.abc import Callable
from dataclasses import replace
from math import log

from armillary.errors import BadModel
from armillary.spec.hf.dense import llama
from armillary.spec.hf.layers import Fields, Raw, kinds, upper_sliding, with_window
from armillary.spec.hf.rope import read_rope

SWIGLU_CLAMPED = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}
"""GPT-OSS's activation, as the kernels have it"""
_GPT_OSS_ROPE = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
"""of files that say nothing, as transformers reads them"""


def mixtral(raw: Raw) -> Fields:
    window = raw.get("sliding_window")
    layers = kinds(raw, sliding=lambda i: bool(window), moe=lambda i: True)
    moe = {
        "num_experts": raw.get("num_local_experts", 8),
        "top_k": raw.get("num_experts_per_tok", 2),
        "ffn": raw.get("intermediate_size"),
        "aux_loss": raw.get("router_aux_loss_coef", 0.001),
    }
    return with_window(layers, window) | {"moe": moe, "ffn": 0, "rope": read_rope(raw, theta=1e6)}


def sparse_layers(raw: Raw) -> Callable[[int], bool]:
    """Qwen-MoE: which layers have experts."""
    only_dense, step = raw.get("mlp_only_layers") or [], raw.get("decoder_sparse_step", 1)
    return lambda i: i not in only_dense and (i + 1) % step == 0


def qwen_moe_table(raw: Raw) -> Fields:
    return {
        "num_experts": raw.get("num_experts") or raw.get("num_local_experts"),
        "top_k": raw["num_experts_per_tok"],
        "ffn": raw["moe_intermediate_size"],
        "normalize": raw.get("norm_topk_prob", False),
        "aux_loss": raw.get("router_aux_loss_coef", 0.001),
    }


def qwen3_moe(raw: Raw) -> Fields:
    window = raw.get("sliding_window") if raw.get("use_sliding_window", False) else None
    return (
        with_window(kinds(raw, sliding=lambda i: bool(window), moe=sparse_layers(raw)), window)
        | llama(raw)
        | {"qk_norm": "head", "moe": qwen_moe_table(raw)}
    )


def qwen3_next(raw: Raw) -> Fields:
    """Gated delta-net layers with a gated full-attention layer after every few; experts unless the family has none."""
    period = raw.get("full_attention_interval") or 4
    types = raw.get("layer_types") or [
        "full_attention" if (i + 1) % period == 0 else "linear_attention" for i in range(raw["num_hidden_layers"])
    ]
    has_experts = bool(raw.get("num_experts"))
    fields: Fields = {
        "norm_plus_one": True,
        "qk_norm": "head",
        "attention_gate": True,
        "rope": read_rope(raw, fraction=0.25),
        "layers": kinds(dict(raw) | {"layer_types": types}, moe=sparse_layers(raw) if has_experts else None),
        "gated_delta": {
            "key_heads": raw["linear_num_key_heads"],
            "value_heads": raw["linear_num_value_heads"],
            "key_dim": raw["linear_key_head_dim"],
            "value_dim": raw["linear_value_head_dim"],
            "conv": raw["linear_conv_kernel_dim"],
        },
    }
    if has_experts:
        shared = {"shared_ffn": raw["shared_expert_intermediate_size"], "shared_gate": True}
        fields["moe"] = qwen_moe_table(raw) | shared
    return llama(raw) | fields


def qwen2_moe(raw: Raw) -> Fields:
    moe = qwen_moe_table(raw) | {"shared_ffn": raw["shared_expert_intermediate_size"], "shared_gate": True}
    sliding = upper_sliding(raw)
    sparse = sparse_layers(raw)
    for i, layer in enumerate(sliding["layers"]):
        layer["mlp"] = "moe" if sparse(i) else "dense"
    return sliding | {"moe": moe, "qkv_bias": raw.get("qkv_bias", True)}


def olmoe(raw: Raw) -> Fields:
    moe = {
        "num_experts": raw["num_experts"],
        "top_k": raw["num_experts_per_tok"],
        "ffn": raw["intermediate_size"],
        "normalize": raw.get("norm_topk_prob", False),
        "aux_loss": raw.get("router_aux_loss_coef", 0.01),
    }
    return llama(raw) | {
        "qk_norm": "all",
        "moe": moe,
        "ffn": 0,
        "layers": kinds(raw, moe=lambda i: True),
        "qkv_clip": raw.get("clip_qkv"),
    }


def deepseek(raw: Raw) -> Fields:
    first, period = raw.get("first_k_dense_replace", 0), raw.get("moe_layer_freq", 1)
    mla = {
        "q_rank": raw.get("q_lora_rank"),
        "kv_rank": raw["kv_lora_rank"],
        "nope_dim": raw["qk_nope_head_dim"],
        "rope_dim": raw["qk_rope_head_dim"],
        "v_dim": raw["v_head_dim"],
    }
    rope = replace(read_rope(raw), interleaved=raw.get("rope_interleave", True))
    scale, stretch = (mla["nope_dim"] + mla["rope_dim"]) ** -0.5, _yarn_softmax(rope.factor, rope.mscale_all_dim)
    bias = raw.get("attention_bias", False)
    return {
        "mla": mla,
        "rope": rope,
        "moe": deepseek_moe(raw),
        "layers": kinds(raw, moe=lambda i: i >= first and i % period == 0),
        "attention_scale": None if stretch == 1.0 else scale * stretch,
        "qkv_bias": bias,
        "out_bias": bias,
    }


def deepseek_moe(raw: Raw) -> Fields:
    """V2 limits groups only where its method says so, and never normalizes, as in transformers."""
    v3 = raw.get("model_type") != "deepseek_v2"
    limited = v3 or raw.get("topk_method") == "group_limited_greedy"
    return {
        "num_experts": raw["n_routed_experts"],
        "top_k": raw["num_experts_per_tok"],
        "ffn": raw["moe_intermediate_size"],
        "shared_ffn": raw["moe_intermediate_size"] * (raw.get("n_shared_experts") or 0),
        "score": "sigmoid" if raw.get("scoring_func", "sigmoid" if v3 else "softmax") == "sigmoid" else "softmax",
        "normalize": v3 and raw.get("norm_topk_prob", True),
        "routed_scale": raw.get("routed_scaling_factor", 1.0),
        "selection_bias": v3,
        "groups": (raw.get("n_group") or 1) if limited else 1,
        "top_groups": (raw.get("topk_group") or 1) if limited else 1,
    }


def glm4_moe(raw: Raw) -> Fields:
    first = raw.get("first_k_dense_replace", 1)
    routing = {"score": "sigmoid", "selection_bias": True, "normalize": raw.get("norm_topk_prob", True)}
    return {
        "qkv_bias": raw.get("attention_bias", False),
        "qk_norm": "head" if raw.get("use_qk_norm", False) else "none",
        "rope": read_rope(raw, fraction=0.5),
        "layers": kinds(raw, moe=lambda i: i >= first),
        "moe": deepseek_moe(raw) | routing,
    }


def _yarn_softmax(factor: float, mscale: float | None) -> float:
    """DeepSeek multiplies the softmax scale by (0.1·mscale·ln(factor) + 1)²."""
    return (0.1 * mscale * log(factor) + 1.0) ** 2 if mscale and factor > 1 else 1.0


def gpt_oss(raw: Raw) -> Fields:
    for key, value in SWIGLU_CLAMPED.items():
        if raw.get(key, value) != value:
            raise BadModel(f"{key}={raw[key]} in config.json cannot be built here, only {value}; take the model's own")
    bias = raw.get("attention_bias", True)
    layers = kinds(raw, sliding=lambda i: i % 2 == 0, moe=lambda i: True)
    moe = {
        "num_experts": raw.get("num_local_experts", 128),
        "top_k": raw.get("num_experts_per_tok", 4),
        "ffn": raw["intermediate_size"],
        "score": "softmax_topk",
        "router_bias": True,
        "expert_bias": True,
        "aux_loss": raw.get("router_aux_loss_coef", 0.001),
    }
    scaling = raw.get("rope_scaling") or _GPT_OSS_ROPE
    return with_window(layers, raw.get("sliding_window", 128)) | {
        "sinks": True,
        "qkv_bias": bias,
        "out_bias": bias,
        "moe": moe,
        "ffn": 0,
        "activation": "swiglu_clamped",
        "rope": read_rope(
            raw if raw.get("rope_parameters") else dict(raw) | {"rope_scaling": scaling}, theta=150_000.0
        ),
    }


def llama4(raw: Raw) -> Fields:
    period, step = raw.get("no_rope_layer_interval", 4), raw.get("interleave_moe_layer_step", 1)
    given = raw.get("moe_layers")
    if given is None:
        given = range(step - 1, raw["num_hidden_layers"], step) if step else ()
    has_experts = set(given)
    no_rope = raw.get("no_rope_layers") or [int((i + 1) % period != 0) for i in range(raw["num_hidden_layers"])]
    layers = kinds(dict(raw) | {"no_rope_layers": no_rope}, moe=lambda i: i in has_experts)
    if not raw.get("layer_types"):
        layers = [layer | {"attention": "chunked" if layer["rope"] else "full"} for layer in layers]
    moe = {
        "num_experts": raw.get("num_local_experts", 16),
        "top_k": raw.get("num_experts_per_tok", 1),
        "ffn": raw["intermediate_size"],
        "shared_ffn": raw["intermediate_size"],
        "score": "sigmoid",
        "normalize": False,
        "scale_input": True,
        "aux_loss": raw.get("router_aux_loss_coef", 0.001),
    }
    qk: Fields = {"qk_norm": "head", "qk_norm_kind": "plain"} if raw.get("use_qk_norm", True) else {}
    if raw.get("attn_temperature_tuning", True):
        qk |= {"query_temperature": raw.get("attn_scale", 0.1), "temperature_floor": raw.get("floor_scale", 8192)}
    return (
        with_window(layers, raw.get("attention_chunk_size", 8192))
        | qk
        | {
            "qkv_bias": raw.get("attention_bias", False),
            "out_bias": raw.get("attention_bias", False),
            "ffn": raw.get("intermediate_size_mlp", raw["intermediate_size"]),
            "moe": moe if has_experts else None,
            "rope": replace(read_rope(raw, theta=500_000.0), interleaved=True),
        }
    )


def dbrx(raw: Raw) -> Fields:
    attn, ffn, hidden, heads = raw["attn_config"], raw["ffn_config"], raw["d_model"], raw["n_heads"]
    moe = {
        "num_experts": ffn["moe_num_experts"],
        "top_k": ffn["moe_top_k"],
        "ffn": ffn["ffn_hidden_size"],
        "aux_loss": ffn.get("moe_loss_weight", 0.01),
    }
    return {
        "hidden": hidden,
        "heads": heads,
        "kv_heads": attn.get("kv_n_heads", 1),
        "head_dim": hidden // heads,
        "ffn": 0,
        "context": raw["max_seq_len"],
        "layers": kinds(raw, moe=lambda i: True),
        "moe": moe,
        "norm": "layer",
        "qkv_clip": attn.get("clip_qkv"),
        "rope": read_rope(attn),
    }
