"""What each Hugging Face model_type means, as functions from its raw config.json to ModelConfig fields.

A reader states only what differs from the common Llama-like reading in `hf_config`; defaults are those of
the family's own configuration class, since older files leave them out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import log
from typing import Any

from armillary.spec.hf_rope import read_rope

Raw = Mapping[str, Any]
Fields = dict[str, Any]


def kinds(
    raw: Raw, *, sliding: Callable[[int], bool] | None = None, moe: Callable[[int], bool] | None = None
) -> list[Fields]:
    """One table a layer, from `layer_types` where the file has it, else from the rules given."""
    types = raw.get("layer_types")
    names = {"full_attention": "full", "sliding_attention": "sliding", "chunked_attention": "chunked"}
    count = raw.get("num_hidden_layers") or raw.get("n_layer") or raw.get("n_layers") or 0
    no_rope = raw.get("no_rope_layers") or [1] * count
    layers = []
    for i in range(count):
        attention = names.get(types[i], types[i]) if types else ("sliding" if sliding and sliding(i) else "full")
        layers.append({"attention": attention, "mlp": "moe" if moe and moe(i) else "dense", "rope": bool(no_rope[i])})
    return layers


def all_sliding(raw: Raw) -> Fields:
    """Mistral-style: one window for every layer, or none."""
    window = raw.get("sliding_window")
    return (
        {"window": window, "layers": kinds(raw, sliding=lambda i: bool(window))} if window else {"layers": kinds(raw)}
    )


def upper_sliding(raw: Raw, *, default_from: int = 28) -> Fields:
    """Qwen2-style: layers from `max_window_layers` on slide, when switched on."""
    on = raw.get("use_sliding_window", False) and raw.get("sliding_window")
    start = raw.get("max_window_layers", default_from)
    layers = kinds(raw, sliding=lambda i: bool(on) and i >= start)
    return with_window(layers, raw.get("sliding_window"))


def with_window(layers: list[Fields], window: int | None) -> Fields:
    """Layers, and the window only where some layer uses it."""
    used = any(layer["attention"] in ("sliding", "chunked") for layer in layers)
    return {"layers": layers, "window": window if used else None}


def llama(raw: Raw) -> Fields:
    bias = raw.get("attention_bias", False)
    return {"qkv_bias": bias, "out_bias": bias, "mlp_bias": raw.get("mlp_bias", False)}


def mistral(raw: Raw) -> Fields:
    return all_sliding(raw)


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


def qwen2(raw: Raw) -> Fields:
    return upper_sliding(raw) | {"qkv_bias": True}


def qwen3(raw: Raw) -> Fields:
    return upper_sliding(raw) | llama(raw) | {"qk_norm": "head"}


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
    layers = kinds(raw, sliding=lambda i: bool(window), moe=sparse_layers(raw))
    return with_window(layers, window) | llama(raw) | {"qk_norm": "head", "moe": qwen_moe_table(raw)}


def qwen2_moe(raw: Raw) -> Fields:
    moe = qwen_moe_table(raw) | {"shared_ffn": raw["shared_expert_intermediate_size"], "shared_gate": True}
    sliding = upper_sliding(raw)
    sparse = sparse_layers(raw)
    for i, layer in enumerate(sliding["layers"]):
        layer["mlp"] = "moe" if sparse(i) else "dense"
    return sliding | {"moe": moe, "qkv_bias": raw.get("qkv_bias", True)}


def phi3(raw: Raw) -> Fields:
    return all_sliding(raw)


def phi(raw: Raw) -> Fields:
    eps = raw.get("layer_norm_eps", 1e-5)
    layer_norm = {"norm": "layer", "norm_bias": True, "norm_eps": eps, "parallel": "one_norm"}
    biases = {"qkv_bias": True, "out_bias": True, "mlp_bias": True, "head_bias": True}
    return layer_norm | biases | {"gated": False, "rope": read_rope(raw, fraction=0.5)}


def gemma(raw: Raw) -> Fields:
    bias = raw.get("attention_bias", False)
    fields = {"norm_plus_one": True, "embedding_scale": raw["hidden_size"] ** 0.5, "qkv_bias": bias, "out_bias": bias}
    # the first Gemma files say gelu and mean its tanh form
    says_gelu = raw.get("hidden_act") == "gelu" and not raw.get("hidden_activation")
    return fields | ({"activation": "gelu_tanh"} if says_gelu else {})


def gemma2(raw: Raw) -> Fields:
    layers = kinds(raw, sliding=lambda i: i % 2 == 0)
    return gemma(raw) | with_window(layers, raw.get("sliding_window", 4096)) | {
        "norm_at": "both",
        "attention_scale": raw.get("query_pre_attn_scalar", 256) ** -0.5,
        "attention_softcap": raw.get("attn_logit_softcapping"),
        "logit_softcap": raw.get("final_logit_softcapping"),
    }  # fmt: skip


def gemma3(raw: Raw) -> Fields:
    every = raw.get("sliding_window_pattern", 6)
    layers = kinds(raw, sliding=lambda i: (i + 1) % every != 0)
    rope = read_rope({"rope_local_base_freq": 10_000.0} | dict(raw), theta=1e6)
    fields = gemma2(raw) | with_window(layers, raw.get("sliding_window", 4096))
    return fields | {"qk_norm": "head", "rope": rope}


def olmo(raw: Raw) -> Fields:
    plain = {"norm": "layer", "norm_weight": False, "norm_eps": 1e-5, "qkv_clip": raw.get("clip_qkv")}
    return llama(raw) | plain


def olmo2(raw: Raw) -> Fields:
    return llama(raw) | {"norm_at": "after", "qk_norm": "all"}


def olmo3(raw: Raw) -> Fields:
    layers = kinds(raw, sliding=lambda i: (i + 1) % 4 != 0)
    return olmo2(raw) | with_window(layers, raw.get("sliding_window", 4096))


def olmoe(raw: Raw) -> Fields:
    moe = {
        "num_experts": raw["num_experts"],
        "top_k": raw["num_experts_per_tok"],
        "ffn": raw["intermediate_size"],
        "normalize": raw.get("norm_topk_prob", False),
        "aux_loss": raw.get("router_aux_loss_coef", 0.01),
    }
    layers = kinds(raw, moe=lambda i: True)
    return llama(raw) | {"qk_norm": "all", "moe": moe, "ffn": 0, "layers": layers, "qkv_clip": raw.get("clip_qkv")}


def gpt2(raw: Raw) -> Fields:
    hidden = raw.get("n_embd", 768)
    context = raw.get("n_positions", 1024)
    return {
        "hidden": hidden, "heads": raw.get("n_head", 12), "kv_heads": raw.get("n_head", 12),
        "head_dim": hidden // raw.get("n_head", 12), "ffn": raw.get("n_inner") or 4 * hidden, "context": context,
        "layers": kinds({"num_hidden_layers": raw.get("n_layer", 12)}), "activation": "gelu_tanh", "gated": False,
        "norm": "layer", "norm_bias": True, "norm_eps": raw.get("layer_norm_epsilon", 1e-5),
        "qkv_bias": True, "out_bias": True, "mlp_bias": True, "positions": "learned", "learned_positions": context,
    }  # fmt: skip


def gpt_neox(raw: Raw) -> Fields:
    bias = raw.get("attention_bias", True)
    return {
        "norm": "layer", "norm_bias": True, "norm_eps": raw.get("layer_norm_eps", 1e-5), "gated": False,
        "parallel": "two_norms" if raw.get("use_parallel_residual", True) else "none",
        "qkv_bias": bias, "out_bias": bias, "mlp_bias": True, "rope": read_rope(raw, fraction=0.25),
    }  # fmt: skip


def falcon(raw: Raw) -> Fields:
    hidden = raw.get("hidden_size") or raw["n_embed"]
    heads = raw.get("num_attention_heads") or raw["n_head"]
    new, bias = raw.get("new_decoder_architecture", False), raw.get("bias", False)
    kv_heads = raw.get("num_kv_heads") or heads if new else (1 if raw.get("multi_query", True) else heads)
    norms = raw.get("num_ln_in_parallel_attn") or (2 if new else 1)
    in_parallel = "two_norms" if norms == 2 else "one_norm"
    return {
        "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "head_dim": hidden // heads,
        "ffn": raw.get("ffn_hidden_size") or 4 * hidden, "gated": False, "activation": "gelu",
        "norm": "layer", "norm_bias": True, "norm_eps": raw.get("layer_norm_epsilon", 1e-5),
        "parallel": in_parallel if new or raw.get("parallel_attn", True) else "none",
        "qkv_bias": bias, "out_bias": bias, "mlp_bias": bias,
        "positions": "alibi" if raw.get("alibi", False) else "rope",
        "context": raw.get("max_position_embeddings", 2048),
    }  # fmt: skip


def mpt(raw: Raw) -> Fields:
    hidden, heads, attn = raw["d_model"], raw["n_heads"], raw.get("attn_config") or {}
    bias = not raw.get("no_bias", True)
    alibi = attn.get("alibi", True)
    return {
        "hidden": hidden, "heads": heads, "kv_heads": attn.get("kv_n_heads", heads), "head_dim": hidden // heads,
        "ffn": raw.get("expansion_ratio", 4) * hidden, "context": raw.get("max_seq_len", 2048), "gated": False,
        "activation": "gelu", "layers": kinds({"num_hidden_layers": raw["n_layers"]}), "norm": "layer",
        "norm_bias": bias, "qkv_bias": bias, "out_bias": bias, "mlp_bias": bias, "qkv_clip": attn.get("clip_qkv"),
        "attention_scale": attn.get("softmax_scale"), "positions": "alibi" if alibi else "learned",
        "learned_positions": 0 if alibi else raw.get("max_seq_len", 2048), "alibi_max": attn.get("alibi_bias_max", 8),
    }  # fmt: skip


def deepseek(raw: Raw) -> Fields:
    first, every = raw.get("first_k_dense_replace", 0), raw.get("moe_layer_freq", 1)
    mla = {
        "q_rank": raw.get("q_lora_rank"), "kv_rank": raw["kv_lora_rank"], "nope_dim": raw["qk_nope_head_dim"],
        "rope_dim": raw["qk_rope_head_dim"], "v_dim": raw["v_head_dim"],
    }  # fmt: skip
    rope = replace(read_rope(raw), interleaved=raw.get("rope_interleave", True))
    scale = (mla["nope_dim"] + mla["rope_dim"]) ** -0.5
    return {
        "mla": mla, "head_dim": mla["nope_dim"] + mla["rope_dim"], "rope": rope, "moe": deepseek_moe(raw),
        "layers": kinds(raw, moe=lambda i: i >= first and i % every == 0),
        "attention_scale": scale * _yarn_softmax(rope.factor, rope.mscale_all_dim),
    }  # fmt: skip


def deepseek_moe(raw: Raw) -> Fields:
    v3 = raw.get("model_type") != "deepseek_v2"
    return {
        "num_experts": raw["n_routed_experts"], "top_k": raw["num_experts_per_tok"],
        "ffn": raw["moe_intermediate_size"],
        "shared_ffn": raw["moe_intermediate_size"] * (raw.get("n_shared_experts") or 0),
        "score": "sigmoid" if raw.get("scoring_func", "sigmoid" if v3 else "softmax") == "sigmoid" else "softmax",
        "normalize": raw.get("norm_topk_prob", v3), "routed_scale": raw.get("routed_scaling_factor", 1.0),
        "selection_bias": v3, "groups": raw.get("n_group") or 1, "top_groups": raw.get("topk_group") or 1,
    }  # fmt: skip


def _yarn_softmax(factor: float, mscale: float | None) -> float:
    """DeepSeek multiplies the softmax scale by (0.1·mscale·ln(factor) + 1)²."""
    return (0.1 * mscale * log(factor) + 1.0) ** 2 if mscale and factor > 1 else 1.0


def gpt_oss(raw: Raw) -> Fields:
    bias = raw.get("attention_bias", True)
    layers = kinds(raw, sliding=lambda i: i % 2 == 0, moe=lambda i: True)
    moe = {
        "num_experts": raw.get("num_local_experts", 128), "top_k": raw.get("num_experts_per_tok", 4),
        "ffn": raw["intermediate_size"], "score": "softmax_topk", "router_bias": True, "expert_bias": True,
        "aux_loss": raw.get("router_aux_loss_coef", 0.001),
    }  # fmt: skip
    return with_window(layers, raw.get("sliding_window", 128)) | {
        "sinks": True, "qkv_bias": bias, "out_bias": bias, "moe": moe, "ffn": 0, "activation": "swiglu_clamped",
        "rope": read_rope(raw, theta=150_000.0),
    }  # fmt: skip


def llama4(raw: Raw) -> Fields:
    every, step = raw.get("no_rope_layer_interval", 4), raw.get("interleave_moe_layer_step", 1)
    has_experts = set(raw.get("moe_layers") or range(step - 1, raw["num_hidden_layers"], step))
    no_rope = raw.get("no_rope_layers") or [int((i + 1) % every != 0) for i in range(raw["num_hidden_layers"])]
    layers = kinds(dict(raw) | {"no_rope_layers": no_rope}, moe=lambda i: i in has_experts)
    if not raw.get("layer_types"):
        layers = [layer | {"attention": "chunked" if layer["rope"] else "full"} for layer in layers]
    moe = {
        "num_experts": raw.get("num_local_experts", 16), "top_k": raw.get("num_experts_per_tok", 1),
        "ffn": raw["intermediate_size"], "shared_ffn": raw["intermediate_size"], "score": "sigmoid",
        "normalize": False, "scale_input": True,
    }  # fmt: skip
    qk = {"qk_norm": "head", "qk_norm_kind": "plain"} if raw.get("use_qk_norm", True) else {}
    rope = replace(read_rope(raw, theta=500_000.0), interleaved=True)
    return with_window(layers, raw.get("attention_chunk_size", 8192)) | qk | {
        "ffn": raw.get("intermediate_size_mlp", raw["intermediate_size"]), "moe": moe, "rope": rope,
    }  # fmt: skip


def smollm3(raw: Raw) -> Fields:
    every = raw.get("no_rope_layer_interval", 4)
    no_rope = raw.get("no_rope_layers") or [int((i + 1) % every != 0) for i in range(raw["num_hidden_layers"])]
    return llama(raw) | {"layers": kinds(dict(raw) | {"no_rope_layers": no_rope}), "rope": read_rope(raw, theta=2e6)}


def granite(raw: Raw) -> Fields:
    return llama(raw) | {
        "embedding_scale": raw.get("embedding_multiplier", 1.0), "residual_scale": raw.get("residual_multiplier", 1.0),
        "attention_scale": raw.get("attention_multiplier", 1.0), "logit_scale": 1.0 / raw.get("logits_scaling", 1.0),
    }  # fmt: skip


def dbrx(raw: Raw) -> Fields:
    attn, ffn, hidden, heads = raw["attn_config"], raw["ffn_config"], raw["d_model"], raw["n_heads"]
    moe = {
        "num_experts": ffn["moe_num_experts"], "top_k": ffn["moe_top_k"], "ffn": ffn["ffn_hidden_size"],
        "aux_loss": ffn.get("moe_loss_weight", 0.01),
    }  # fmt: skip
    return {
        "hidden": hidden, "heads": heads, "kv_heads": attn.get("kv_n_heads", 1), "head_dim": hidden // heads, "ffn": 0,
        "context": raw["max_seq_len"], "layers": kinds(raw, moe=lambda i: True), "moe": moe, "norm": "layer",
        "qkv_clip": attn.get("clip_qkv"), "rope": read_rope(attn),
    }  # fmt: skip


READERS: dict[str, Callable[[Raw], Fields]] = {
    "llama": llama, "mistral": mistral, "ministral": mistral, "mixtral": mixtral, "qwen2": qwen2, "qwen3": qwen3,
    "qwen2_moe": qwen2_moe, "qwen3_moe": qwen3_moe, "phi": phi, "phi3": phi3, "gemma": gemma, "gemma2": gemma2,
    "gemma3_text": gemma3, "gemma3": gemma3, "olmo": olmo, "olmo2": olmo2, "olmo3": olmo3, "olmoe": olmoe,
    "gpt2": gpt2, "gpt_neox": gpt_neox, "falcon": falcon, "mpt": mpt, "deepseek_v2": deepseek, "deepseek_v3": deepseek,
    "kimi_k2": deepseek, "gpt_oss": gpt_oss, "llama4": llama4, "llama4_text": llama4, "smollm3": smollm3,
    "granite": granite, "dbrx": dbrx,
}  # fmt: skip
