"""Hugging Face config.json <-> ModelConfig.

Reading covers every family of the catalogue; writing covers those whose weights `model.weights` can write, and
refuses a shape that the family cannot express.
"""

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from armillary.errors import BadModel, nearest
from armillary.spec.hf import dense, moe
from armillary.spec.hf.layers import Fields, Raw, all_sliding, kinds
from armillary.spec.hf.moe import SWIGLU_CLAMPED
from armillary.spec.hf.rope import brief_longrope, read_rope, write_rope
from armillary.spec.hf.user_family import find_family
from armillary.spec.model import ModelConfig, MoE
from armillary.spec.toml.fields import build

READERS: dict[str, Callable[[Raw], Fields]] = {
    "llama": dense.llama,
    "mistral": all_sliding,
    "ministral": all_sliding,
    "mixtral": moe.mixtral,
    "qwen2": dense.qwen2,
    "qwen3": dense.qwen3,
    "qwen2_moe": moe.qwen2_moe,
    "qwen3_moe": moe.qwen3_moe,
    "phi": dense.phi,
    "phi3": dense.phi3,
    "gemma": dense.gemma,
    "gemma2": dense.gemma2,
    "gemma3_text": dense.gemma3,
    "gemma3": dense.gemma3,
    "olmo": dense.olmo,
    "olmo2": dense.olmo2,
    "olmo3": dense.olmo3,
    "olmoe": moe.olmoe,
    "gpt2": dense.gpt2,
    "gpt_neox": dense.gpt_neox,
    "falcon": dense.falcon,
    "mpt": dense.mpt,
    "glm4_moe": moe.glm4_moe,
    "deepseek_v2": moe.deepseek,
    "deepseek_v3": moe.deepseek,
    "kimi_k2": moe.deepseek,
    "gpt_oss": moe.gpt_oss,
    "llama4": moe.llama4,
    "llama4_text": moe.llama4,
    "smollm3": dense.smollm3,
    "granite": dense.granite,
    "dbrx": moe.dbrx,
}
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
_SAME_AS = {"gemma3": "gemma3_text", "llama4": "llama4_text", "kimi_k2": "deepseek_v3"}
_ACTIVATIONS_OUT = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu": "relu", "relu2": "relu2"}


def from_hf(raw: Mapping[str, Any], *, name: str) -> ModelConfig:
    """ModelConfig from a parsed config.json (its text part, for multimodal models)."""
    if isinstance(raw.get("text_config"), Mapping):
        raw = {"model_type": raw.get("model_type")} | dict(raw["text_config"])
    family = str(raw.get("model_type"))
    reader = _reader(family, name)
    raw = _defaults().get(_SAME_AS.get(family, family), {}) | dict(raw)
    try:
        return build(ModelConfig, {"name": name, "family": family} | _common(raw) | reader(raw), f"{name}/config.json")
    except KeyError as error:
        raise BadModel(f"{name}: config.json lacks {error.args[0]}; take the model's own config.json") from None
    except (TypeError, AttributeError, IndexError, ValueError, OverflowError, ZeroDivisionError) as error:
        raise BadModel(f"{name}: config.json has a value of the wrong kind ({error}); take the model's own") from None


def _reader(family: str, name: str) -> Callable[[Raw], Fields]:
    """Of a family of ours, or of the user's."""
    if family in READERS:
        return READERS[family]
    if (own := find_family(family)) is not None:
        return own.read
    guess = nearest(family, READERS)
    begin = f"did you mean {guess}? One" if guess else "one"
    hint = f"{begin} of your own is given with --model-code FILE (docs/models.md)"
    raise BadModel(f"{name}: model_type '{family}' in config.json is not known; {hint}")


@cache
def _defaults() -> dict[str, dict[str, Any]]:
    return tomllib.loads((Path(__file__).parent / "defaults.toml").read_text())


def _has_no_head(raw: Mapping[str, Any]) -> bool:
    """Whether it was saved without a head, as embedding models are: architecture MistralModel, not MistralForCausalLM.
    Its embedding then stands for the head, as a tied one."""
    architectures = raw.get("architectures")
    first = architectures[0] if isinstance(architectures, list) and architectures else None
    return isinstance(first, str) and first.endswith("Model") and not first.endswith(("LMHeadModel", "LMModel"))


def _common(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The Llama-like fields that most families share; readers override what differs."""
    tied = raw.get("tie_word_embeddings") or _has_no_head(raw)
    if "hidden_size" not in raw:
        return {"vocab": raw["vocab_size"], "tied": tied, "rope": read_rope(raw)}
    hidden, heads = raw["hidden_size"], raw["num_attention_heads"]
    return {
        "hidden": hidden,
        "heads": heads,
        "kv_heads": raw.get("num_key_value_heads") or heads,
        "head_dim": raw.get("head_dim") or hidden // heads,
        "ffn": raw.get("intermediate_size", 4 * hidden),
        "vocab": raw["vocab_size"],
        "context": raw["max_position_embeddings"],
        "layers": kinds(raw),
        "tied": tied,
        "norm_eps": raw.get("rms_norm_eps", 1e-6),
        "activation": _activation(raw),
        "rope": read_rope(raw),
    }


def _activation(raw: Mapping[str, Any]) -> str:
    name = raw.get("hidden_activation") or raw.get("hidden_act") or "silu"
    if name not in _ACTIVATIONS:
        raise BadModel(f"activation '{name}' is not known; it can be one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


# --- writing


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """A config.json that transformers loads as the same model."""
    if _writer(config.family) is None:
        known = ", ".join(WRITERS)
        raise BadModel(
            f"{config.name}: writing model_type '{config.family}' is not supported; it can be {known}, or one of your "
            "own with --model-code FILE"
        )
    raw = _written(config)
    if lost := _lost(config, from_hf(raw, name=config.name)):  # an error, not a silent change of the model
        able = [family for family in WRITERS if _says(replace(config, family=family))]
        step = f"try --set model.family={' or '.join(able[:2])}" if able else "no other can either: leave it out"
        raise BadModel(f"{config.name}: a '{config.family}' config.json cannot express {', '.join(lost)}; {step}")
    return raw


Writer = Callable[[ModelConfig], dict[str, Any]]


def _writer(family: str) -> tuple[str, Writer] | None:
    """(architecture, the keys beside the common ones) of a family of ours, or of the user's."""
    if family in WRITERS:
        return WRITERS[family]
    own = find_family(family)
    return None if own is None or own.write is None else (own.architecture, own.write)


def _written(config: ModelConfig) -> dict[str, Any]:
    known = _writer(config.family)
    assert known is not None, "only families that can be written"
    architecture, writer = known
    shared = {
        "architectures": [architecture],
        "model_type": config.family,
        "hidden_size": config.hidden,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.ffn,
        "vocab_size": config.vocab,
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": _ACTIVATIONS_OUT.get(config.activation, config.activation),
        "tie_word_embeddings": config.tied,
    }
    return shared | write_rope(config.rope) | writer(config)


def _lost(wanted: Any, written: Any, prefix: str = "") -> list[str]:
    """Names of the fields that differ, within tables too: 'window', 'moe.shared_ffn'."""
    names = []
    for field in fields(wanted):
        before, after = getattr(wanted, field.name), getattr(written, field.name)
        if before != after:
            same = type(before) is type(after) and is_dataclass(before)
            names += _lost(before, after, f"{prefix}{field.name}.") if same else [prefix + field.name]
    return names


def _says(config: ModelConfig) -> bool:
    try:
        return from_hf(_written(config), name=config.name) == config
    except (BadModel, KeyError, TypeError, ValueError):  # a family may have no fields for the shape at all
        return False


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
        "hidden_activation": _ACTIVATIONS_OUT[config.activation],
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
    "glm4_moe": ("Glm4MoeForCausalLM", _write_glm4_moe),
    "gpt_oss": ("GptOssForCausalLM", _write_gpt_oss),
    "llama4_text": ("Llama4ForCausalLM", _write_llama4),
    "deepseek_v2": ("DeepseekV2ForCausalLM", _write_deepseek),
    "deepseek_v3": ("DeepseekV3ForCausalLM", _write_deepseek),
    "kimi_k2": ("DeepseekV3ForCausalLM", _write_deepseek),
    "phi3": ("Phi3ForCausalLM", _write_phi3),
    "gemma": ("GemmaForCausalLM", _write_bias),
    "gemma2": ("Gemma2ForCausalLM", _write_gemma2),
    "olmo2": ("Olmo2ForCausalLM", _write_bias),
}
