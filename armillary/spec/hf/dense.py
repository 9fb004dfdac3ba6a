"""Readers of dense families: from a raw config.json to the ModelConfig fields that differ from the common reading.

Defaults that files leave out are in defaults.toml.
"""

from armillary.spec.hf.layers import Fields, Raw, all_sliding, kinds, upper_sliding, with_window
from armillary.spec.hf.rope import read_rope


def llama(raw: Raw) -> Fields:
    bias = raw.get("attention_bias", False)
    return {"qkv_bias": bias, "out_bias": bias, "mlp_bias": raw.get("mlp_bias", False)}


def simplicial(raw: Raw) -> Fields:
    window_1, window_2 = raw["simplicial_windows"]
    return (
        llama(raw)
        | with_window(kinds(raw), raw.get("sliding_window"))
        | {
            "simplicial": {"window_1": window_1, "window_2": window_2},
            "qk_norm": "head" if raw.get("use_qk_norm") else "none",
        }
    )


def qwen2(raw: Raw) -> Fields:
    return upper_sliding(raw) | {"qkv_bias": True}


def qwen3(raw: Raw) -> Fields:
    return upper_sliding(raw) | llama(raw) | {"qk_norm": "head"}


def phi3(raw: Raw) -> Fields:
    return all_sliding(raw) | {"rope": read_rope(raw, fraction=1.0)}


def phi(raw: Raw) -> Fields:
    return {
        "norm": "layer",
        "norm_bias": True,
        "norm_eps": raw.get("layer_norm_eps", 1e-5),
        "parallel": "one_norm",
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
        "head_bias": True,
        "gated": False,
        "rope": read_rope(raw, fraction=0.5),
    }


def gemma(raw: Raw) -> Fields:
    bias = raw.get("attention_bias", False)
    fields = {"norm_plus_one": True, "embedding_scale": raw["hidden_size"] ** 0.5, "qkv_bias": bias, "out_bias": bias}
    # the first Gemma files say gelu and mean its tanh form
    says_gelu = raw.get("hidden_act") == "gelu" and not raw.get("hidden_activation")
    return fields | ({"activation": "gelu_tanh"} if says_gelu else {})


def gemma2(raw: Raw) -> Fields:
    return (
        gemma(raw)
        | with_window(kinds(raw, sliding=lambda i: i % 2 == 0), raw.get("sliding_window", 4096))
        | {
            "norm_at": "both",
            "attention_scale": raw.get("query_pre_attn_scalar", 256) ** -0.5,
            "attention_softcap": raw.get("attn_logit_softcapping"),
            "logit_softcap": raw.get("final_logit_softcapping"),
        }
    )


def gemma3(raw: Raw) -> Fields:
    period = raw.get("sliding_window_pattern", 6)
    layers = kinds(raw, sliding=lambda i: (i + 1) % period != 0)
    rope = read_rope({"rope_local_base_freq": 10_000.0} | dict(raw), theta=1e6)
    return gemma2(raw) | with_window(layers, raw.get("sliding_window", 4096)) | {"qk_norm": "head", "rope": rope}


def olmo(raw: Raw) -> Fields:
    plain = {"norm": "layer", "norm_weight": False, "norm_eps": 1e-5, "qkv_clip": raw.get("clip_qkv")}
    return llama(raw) | plain


def olmo2(raw: Raw) -> Fields:
    return llama(raw) | {"norm_at": "after", "qk_norm": "all"}


def olmo3(raw: Raw) -> Fields:
    return olmo2(raw) | with_window(kinds(raw, sliding=lambda i: (i + 1) % 4 != 0), raw.get("sliding_window", 4096))


def gpt2(raw: Raw) -> Fields:
    hidden = raw.get("n_embd", 768)
    context = raw.get("n_positions", 1024)
    return {
        "hidden": hidden,
        "heads": raw.get("n_head", 12),
        "kv_heads": raw.get("n_head", 12),
        "head_dim": hidden // raw.get("n_head", 12),
        "ffn": raw.get("n_inner") or 4 * hidden,
        "context": context,
        "layers": kinds({"num_hidden_layers": raw.get("n_layer", 12)}),
        "activation": "gelu_tanh",
        "gated": False,
        "norm": "layer",
        "norm_bias": True,
        "norm_eps": raw.get("layer_norm_epsilon", 1e-5),
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
        "positions": "learned",
        "learned_positions": context,
    }


def gpt_neox(raw: Raw) -> Fields:
    bias = raw.get("attention_bias", True)
    return {
        "norm": "layer",
        "norm_bias": True,
        "norm_eps": raw.get("layer_norm_eps", 1e-5),
        "gated": False,
        "parallel": "two_norms" if raw.get("use_parallel_residual", True) else "none",
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp_bias": True,
        "rope": read_rope(raw, fraction=0.25),
    }


def falcon(raw: Raw) -> Fields:
    hidden = raw.get("hidden_size") or raw["n_embed"]
    heads = raw.get("num_attention_heads") or raw["n_head"]
    new, bias = raw.get("new_decoder_architecture", False), raw.get("bias", False)
    kv_heads = raw.get("num_kv_heads") or heads if new else (1 if raw.get("multi_query", True) else heads)
    norms = raw.get("num_ln_in_parallel_attn") or (2 if new else 1)
    in_parallel = "two_norms" if norms == 2 else "one_norm"
    return {
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": hidden // heads,
        "ffn": raw.get("ffn_hidden_size") or 4 * hidden,
        "gated": False,
        "activation": "gelu",
        "norm": "layer",
        "norm_bias": True,
        "norm_eps": raw.get("layer_norm_epsilon", 1e-5),
        "parallel": in_parallel if new or raw.get("parallel_attn", True) else "none",
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp_bias": bias,
        "positions": "alibi" if raw.get("alibi", False) else "rope",
        "context": raw.get("max_position_embeddings", 2048),
    }


def mpt(raw: Raw) -> Fields:
    hidden, heads, attn = raw["d_model"], raw["n_heads"], raw.get("attn_config") or {}
    bias = not raw.get("no_bias", True)
    alibi = attn.get("alibi", True)
    return {
        "hidden": hidden,
        "heads": heads,
        "kv_heads": attn.get("kv_n_heads", heads),
        "head_dim": hidden // heads,
        "ffn": raw.get("expansion_ratio", 4) * hidden,
        "context": raw.get("max_seq_len", 2048),
        "gated": False,
        "activation": "gelu",
        "layers": kinds({"num_hidden_layers": raw["n_layers"]}),
        "norm": "layer",
        "norm_bias": bias,
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp_bias": bias,
        "qkv_clip": attn.get("clip_qkv"),
        "attention_scale": attn.get("softmax_scale"),
        "positions": "alibi" if alibi else "learned",
        "learned_positions": 0 if alibi else raw.get("max_seq_len", 2048),
        "alibi_max": attn.get("alibi_bias_max", 8),
    }


def smollm3(raw: Raw) -> Fields:
    period = raw.get("no_rope_layer_interval", 4)
    no_rope = raw.get("no_rope_layers") or [int((i + 1) % period != 0) for i in range(raw["num_hidden_layers"])]
    return llama(raw) | {"layers": kinds(dict(raw) | {"no_rope_layers": no_rope}), "rope": read_rope(raw, theta=2e6)}


def granite(raw: Raw) -> Fields:
    return llama(raw) | {
        "embedding_scale": raw.get("embedding_multiplier", 1.0),
        "residual_scale": raw.get("residual_multiplier", 1.0),
        "attention_scale": raw.get("attention_multiplier", 1.0),
        "logit_scale": 1.0 / raw.get("logits_scaling", 1.0),
    }
