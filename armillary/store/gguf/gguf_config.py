"""GGUF metadata as the config.json it was made from."""

import math
import struct
from typing import Any

from armillary.errors import BadModel
from armillary.store.gguf.gguf_header import GgufHeader

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""supported values of general.architecture; Mistral's files say llama"""


def to_hf_config(header: GgufHeader) -> dict[str, Any]:
    """The fields of config.json; BadModel where one is missing or no number."""
    arch = header.metadata.get("general.architecture")
    if arch not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise BadModel(f"{header.path}: GGUF files of architecture '{arch}' are not supported; these are: {known}")
    integer, number = _Fields(header, f"{arch}.").integer, _Fields(header, f"{arch}.").number
    if integer("expert_count", 0):
        raise BadModel(f"{header.path}: mixtures of experts in GGUF are not supported; take the safetensors folder")
    hidden, heads = integer("embedding_length"), integer("attention.head_count")
    tokens = header.tensors.get("token_embd.weight")
    raw: dict[str, Any] = {
        "model_type": arch,
        "vocab_size": tokens.shape[0] if tokens else integer("vocab_size"),
        "hidden_size": hidden,
        "num_hidden_layers": integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": integer("attention.head_count_kv", heads),
        "head_dim": integer("attention.key_length", hidden // max(heads, 1)),
        "intermediate_size": integer("feed_forward_length"),
        "max_position_embeddings": integer("context_length"),
        "rms_norm_eps": number("attention.layer_norm_rms_epsilon"),
        "rope_theta": number("rope.freq_base", 10000.0),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "torch_dtype": "bfloat16" if any(each.kind == "BF16" for each in header.tensors.values()) else "float16",
    }
    if arch == "llama":
        raw["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
    if (scaling := _rope_scaling(header, arch, raw)) is not None:
        raw["rope_scaling"] = scaling
    return raw | _token_ids(header)


class _Fields:
    """Numbers of the metadata by key."""

    def __init__(self, header: GgufHeader, prefix: str) -> None:
        self._header, self._prefix = header, prefix

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._header.metadata.get(self._prefix + key, default)
        if isinstance(value, list) and value and len(set(value)) == 1:
            value = value[0]  # one for each layer, all alike
        if type(value) is not int or not 0 <= value < 1 << 31:
            raise self._wrong(key, value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value: Any = self._header.metadata.get(self._prefix + key, default)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise self._wrong(key, value)
        return round(float(value), 12)

    def _wrong(self, key: str, value: Any) -> BadModel:
        text = repr(value)[:40]
        return BadModel(f"{self._header.path}: {self._prefix}{key} in its metadata is {text}; fetch the file again")


def _token_ids(header: GgufHeader) -> dict[str, Any]:
    ids = {name: header.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "padding")}
    fields = {"bos_token_id": ids["bos"], "eos_token_id": ids["eos"], "pad_token_id": ids["padding"]}
    return {key: value if type(value) is int else None for key, value in fields.items()}


def _rope_scaling(header: GgufHeader, arch: str, raw: dict[str, Any]) -> dict[str, Any] | None:
    kind = header.metadata.get(f"{arch}.rope.scaling.type", "none")
    if "rope_freqs.weight" in header.tensors:
        return _llama3_scaling(header, raw)
    if kind in ("none", "linear"):
        factor = header.metadata.get(f"{arch}.rope.scaling.factor", 1.0)
        return {"rope_type": "linear", "factor": factor} if kind == "linear" and factor != 1.0 else None
    raise BadModel(f"{header.path}: rope scaling '{kind}' in GGUF is not supported; take the safetensors folder")


_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""of every Llama 3.1 to 3.3 (config.json at meta-llama)"""


def _llama3_scaling(header: GgufHeader, raw: dict[str, Any]) -> dict[str, Any]:
    """Llama 3.1's rule: the file holds only what it makes of the frequencies, so the rule is checked against that."""
    tensor = header.tensors["rope_freqs.weight"]
    with open(header.path, "rb") as file:
        file.seek(tensor.begin)
        divisors = struct.unpack(f"<{tensor.nbytes // 4}f", file.read(tensor.nbytes)) if tensor.kind == "F32" else ()
    if not divisors or not all(math.isfinite(each) and each >= 1 for each in divisors):
        raise _unknown_rule(header)
    factor = max(divisors)
    expected = [
        llama3_divisor(raw["rope_theta"] ** (-2 * i / raw["head_dim"]), factor) for i in range(raw["head_dim"] // 2)
    ]
    if len(divisors) != len(expected) or any(abs(a - b) > 1e-3 * b for a, b in zip(divisors, expected, strict=True)):
        raise _unknown_rule(header)
    return {"rope_type": "llama3", "factor": factor} | _LLAMA3


def _unknown_rule(header: GgufHeader) -> BadModel:
    return BadModel(f"{header.path}: its rope frequencies follow no rule we know; take the safetensors folder")


def llama3_divisor(frequency: float, factor: float) -> float:
    """What a frequency is divided by: 1 for short wavelengths, `factor` for long ones, in between a blend."""
    low, high, old = _LLAMA3.values()
    rotations = old * frequency / (2 * math.pi)
    if rotations > high:
        return 1.0
    if rotations < low:
        return factor
    blend = (rotations - low) / (high - low)
    return 1 / ((1 - blend) / factor + blend)
