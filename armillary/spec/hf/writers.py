"""Writers of families: from a ModelConfig to the keys of its config.json that differ from Llama's."""

from collections.abc import Callable
from typing import Any

from armillary.errors import BadModel
from armillary.spec.hf.layers import LAYER_TYPES
from armillary.spec.hf.moe import SWIGLU_CLAMPED
from armillary.spec.hf.rope import brief_longrope
from armillary.spec.model import ModelConfig, MoE

Writer = Callable[[ModelConfig], dict[str, Any]]
ACTIVATIONS_OUT = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu": "relu", "relu2": "relu2"}


def _write_llama(config: ModelConfig) -> dict[str, Any]:
    return {"attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}


def _write_phi3(config: ModelConfig) -> dict[str, Any]:
    original = config.rope.original_context or config.context
    extra: dict[str, Any] = {"sliding_window": config.window, "partial_rotary_factor": config.rope.fraction}
    if config.rope.scaling == "longrope" and config.rope.factor == config.context / original:
        extra["rope_scaling"] = brief_longrope(config.rope)
    return extra | {"original_max_position_embeddings": original}


def _write_qwen(config: ModelConfig) -> dict[str, Any]:
    sliding = [kind.attention == "sliding" for kind in config.layers]
    start = sliding.index(True) if any(sliding) else config.num_layers
    types = {True: "sliding_attention", False: "full_attention"}
    return {
        "use_sliding_window": any(sliding),
        "sliding_window": config.window,
        "max_window_layers": start,
        "layer_types": [types[slides] for slides in sliding],
    }


def _write_qwen3_moe(config: ModelConfig) -> dict[str, Any]:
    moe = _experts(config)
    return {
        "attention_bias": config.qkv_bias,
        "use_sliding_window": config.window is not None,
        "sliding_window": config.window,
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.ffn,
        "norm_topk_prob": moe.normalize,
        "router_aux_loss_coef": moe.aux_loss,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i, kind in enumerate(config.layers) if kind.mlp == "dense"],
    }


def _write_qwen3_next(config: ModelConfig) -> dict[str, Any]:
    return _write_qwen3_5_moe(config) | {
        "norm_topk_prob": _experts(config).normalize,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i, kind in enumerate(config.layers) if kind.mlp == "dense"],
    }


def _write_qwen3_5_moe(config: ModelConfig) -> dict[str, Any]:
    moe = _experts(config)
    return _write_qwen3_5(config) | {
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.ffn,
        "shared_expert_intermediate_size": moe.shared_ffn,
        "router_aux_loss_coef": moe.aux_loss,
    }


def _write_qwen3_5(config: ModelConfig) -> dict[str, Any]:
    delta = config.gated_delta
    if delta is None:
        raise BadModel(
            f"{config.name}: a '{config.family}' config.json is of a model with gated delta-net layers and this has "
            "none; try --set model.family=qwen3_moe, or give it [model.gated_delta]"
        )
    theirs = {ours: name for name, ours in LAYER_TYPES.items()}
    return _write_bias(config) | {
        "partial_rotary_factor": config.rope.fraction,
        "layer_types": [theirs.get(kind.attention, kind.attention) for kind in config.layers],
        "linear_conv_kernel_dim": delta.conv,
        "linear_key_head_dim": delta.key_dim,
        "linear_value_head_dim": delta.value_dim,
        "linear_num_key_heads": delta.key_heads,
        "linear_num_value_heads": delta.value_heads,
    }


def _write_mixtral(config: ModelConfig) -> dict[str, Any]:
    moe = _experts(config)
    return {
        "intermediate_size": moe.ffn,
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "router_aux_loss_coef": moe.aux_loss,
        "sliding_window": config.window,
    }


def _write_glm4_moe(config: ModelConfig) -> dict[str, Any]:
    return _deepseek_experts(config) | {
        "attention_bias": config.qkv_bias,
        "use_qk_norm": config.qk_norm == "head",
        "partial_rotary_factor": config.rope.fraction,
    }


def _write_deepseek(config: ModelConfig) -> dict[str, Any]:
    mla, moe = config.mla, _experts(config)
    if mla is None:
        raise BadModel(
            f"{config.name}: a '{config.family}' config.json is of a model with latent attention and this has none; "
            "try --set model.family=glm4_moe, or give it [model.mla]"
        )
    method = "group_limited_greedy" if moe.groups > 1 else "greedy"
    v2 = config.family == "deepseek_v2"
    routing = {"topk_method": method} if v2 else {"rope_interleave": config.rope.interleaved, "topk_method": "noaux_tc"}
    return _deepseek_experts(config) | {
        "attention_bias": config.qkv_bias,
        "head_dim": mla.rope_dim,
        "q_lora_rank": mla.q_rank,
        "kv_lora_rank": mla.kv_rank,
        "qk_nope_head_dim": mla.nope_dim,
        "qk_rope_head_dim": mla.rope_dim,
        "v_head_dim": mla.v_dim,
        "scoring_func": moe.score,
        "moe_layer_freq": 1,
        **routing,
    }


def _deepseek_experts(config: ModelConfig) -> dict[str, Any]:
    moe = _experts(config)
    return {
        "first_k_dense_replace": config.num_layers - config.num_moe_layers,
        "n_routed_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.ffn,
        "n_shared_experts": moe.shared_ffn // moe.ffn,
        "norm_topk_prob": moe.normalize,
        "routed_scaling_factor": moe.routed_scale,
        "n_group": moe.groups,
        "topk_group": moe.top_groups,
        "num_nextn_predict_layers": 0,
    }


def _write_gpt_oss(config: ModelConfig) -> dict[str, Any]:
    moe = _experts(config)
    default = {"rope_scaling": {"rope_type": "default"}} if config.rope.scaling == "none" else {}
    return (
        _write_bias(config)
        | default
        | {
            "hidden_act": "silu",
            "intermediate_size": moe.ffn,
            "num_local_experts": moe.num_experts,
            "num_experts_per_tok": moe.top_k,
            "router_aux_loss_coef": moe.aux_loss,
            "sliding_window": config.window or 128,  # readers want a number even where no layer slides
            "layer_types": _layer_types(config),
            **SWIGLU_CLAMPED,
        }
    )


def _write_llama4(config: ModelConfig) -> dict[str, Any]:
    moe = _experts(config)
    return _write_bias(config) | {
        "intermediate_size": moe.ffn,
        "intermediate_size_mlp": config.ffn,
        "attention_chunk_size": config.window or 8192,
        "layer_types": _layer_types(config),
        "no_rope_layers": [int(kind.rope) for kind in config.layers],
        "moe_layers": [i for i, kind in enumerate(config.layers) if kind.mlp == "moe"],
        "use_qk_norm": config.qk_norm != "none",
        "attn_temperature_tuning": config.query_temperature != 0.0,
        "attn_scale": config.query_temperature or 0.1,
        "floor_scale": config.temperature_floor,
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "router_aux_loss_coef": moe.aux_loss,
    }


def _layer_types(config: ModelConfig) -> list[str]:
    return [f"{kind.attention}_attention" for kind in config.layers]


def _write_simplicial(config: ModelConfig) -> dict[str, Any]:
    """Our own model_type: Llama's keys with 2-simplicial layers."""
    windows = config.simplicial
    if windows is None:
        raise BadModel(
            f"{config.name}: a 'simplicial' config.json is of a model with 2-simplicial layers and this has none; try "
            "--set model.family=llama, or give it [model.simplicial]"
        )
    theirs = {ours: name for name, ours in LAYER_TYPES.items()}
    return _write_llama(config) | {
        "layer_types": [theirs[kind.attention] for kind in config.layers],
        "no_rope_layers": [int(kind.rope) for kind in config.layers],
        "sliding_window": config.window,
        "simplicial_windows": [windows.window_1, windows.window_2],
        "use_qk_norm": config.qk_norm == "head",
    }


def _experts(config: ModelConfig) -> MoE:
    if config.moe is None:
        raise BadModel(
            f"{config.name}: a '{config.family}' config.json is of a model with experts and this has none; "
            "try --set model.family=llama, or give it [model.moe]"
        )
    return config.moe


def _write_bias(config: ModelConfig) -> dict[str, Any]:
    return {"attention_bias": config.qkv_bias}


def _write_gemma2(config: ModelConfig) -> dict[str, Any]:
    scalar = config.scale**-2
    rounded = round(scalar)
    return _write_bias(config) | {
        "hidden_activation": ACTIVATIONS_OUT[config.activation],
        # the scale is stored as its inverse square; an integer is restored exactly
        "query_pre_attn_scalar": rounded if rounded**-0.5 == config.scale else scalar,
        "attn_logit_softcapping": config.attention_softcap,
        "final_logit_softcapping": config.logit_softcap,
        "sliding_window": config.window or config.context,  # readers want a number even where no layer slides
        "layer_types": _layer_types(config),
    }


WRITERS: dict[str, tuple[str, Writer]] = {
    "llama": ("LlamaForCausalLM", _write_llama),
    "mistral": ("MistralForCausalLM", lambda config: {"sliding_window": config.window}),
    "mixtral": ("MixtralForCausalLM", _write_mixtral),
    "qwen2": ("Qwen2ForCausalLM", _write_qwen),
    "qwen3": ("Qwen3ForCausalLM", lambda config: _write_qwen(config) | _write_bias(config)),
    "qwen3_moe": ("Qwen3MoeForCausalLM", _write_qwen3_moe),
    "qwen3_next": ("Qwen3NextForCausalLM", _write_qwen3_next),
    "qwen3_5_text": ("Qwen3_5ForCausalLM", _write_qwen3_5),
    "qwen3_5_moe_text": ("Qwen3_5MoeForCausalLM", _write_qwen3_5_moe),
    "glm4_moe": ("Glm4MoeForCausalLM", _write_glm4_moe),
    "gpt_oss": ("GptOssForCausalLM", _write_gpt_oss),
    "llama4_text": ("Llama4ForCausalLM", _write_llama4),
    "deepseek_v2": ("DeepseekV2ForCausalLM", _write_deepseek),
    "deepseek_v3": ("DeepseekV3ForCausalLM", _write_deepseek),
    "kimi_k2": ("DeepseekV3ForCausalLM", _write_deepseek),
    "phi3": ("Phi3ForCausalLM", _write_phi3),
    "gemma": ("GemmaForCausalLM", _write_bias),
    "gemma2": ("Gemma2ForCausalLM", _write_gemma2),
    "simplicial": ("SimplicialForCausalLM", _write_simplicial),
    "olmo2": ("Olmo2ForCausalLM", _write_bias),
}
