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
from armillary.spec.hf.rope import read_rope, write_rope
from armillary.spec.hf.user_family import find_family
from armillary.spec.hf.writers import ACTIVATIONS_OUT, WRITERS, Writer
from armillary.spec.model import ModelConfig
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
    "qwen3_next": moe.qwen3_next,
    "qwen3_5_text": moe.qwen3_next,
    "qwen3_5": moe.qwen3_next,
    "qwen3_5_moe_text": moe.qwen3_next,
    "qwen3_5_moe": moe.qwen3_next,
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
    "simplicial": dense.simplicial,
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
_SAME_AS = {
    "gemma3": "gemma3_text",
    "llama4": "llama4_text",
    "kimi_k2": "deepseek_v3",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}


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


RECURRENT = {
    **dict.fromkeys(("mamba", "mamba2", "jamba", "bamba", "falcon_h1", "nemotron_h", "granitemoehybrid"), "Mamba"),
    **dict.fromkeys(("rwkv", "recurrent_gemma"), "recurrent"),
}
"""families that `ModelConfig` cannot describe, and why"""


def _reader(family: str, name: str) -> Callable[[Raw], Fields]:
    """Of a family of ours, or of the user's."""
    if family in READERS:
        return READERS[family]
    if (own := find_family(family)) is not None:
        return own.read
    if family in RECURRENT:
        raise BadModel(
            f"{name}: a '{family}' model has {RECURRENT[family]} layers, whose state is not a KV cache; these are not "
            "built, trained or served here yet: take a family of docs/models.md"
        )
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
        "hidden_act": ACTIVATIONS_OUT.get(config.activation, config.activation),
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
