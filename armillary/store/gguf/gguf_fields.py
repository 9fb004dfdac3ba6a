"""The metadata of a GGUF file, from the config.json and tokenizer.json of a model folder.

The inverse of `gguf_config` and `gguf_tokenizer`; keys are those that llama.cpp's own converter writes.
"""

import json
from pathlib import Path
from typing import Any

from armillary.errors import BadModel
from armillary.spec.model import ModelConfig
from armillary.store.gguf.gguf_config import llama3_divisor
from armillary.store.gguf.gguf_tokenizer import CONTROL, NO_VOCABULARY, SPLITS, UNKNOWN, USER_DEFINED, WHOLE

ARCHITECTURE_OF = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_NORMAL, _UNUSED, _BYTE = 1, 5, 6


def architecture(config: ModelConfig) -> str:
    """general.architecture; BadModel for a shape that no GGUF file expresses."""
    arch = ARCHITECTURE_OF.get(config.family)
    if arch is None:
        known = ", ".join(ARCHITECTURE_OF)
        raise BadModel(f"GGUF files of model_type '{config.family}' are not written; these are: {known}")
    if config.window and any(kind.attention == "sliding" for kind in config.layers):
        raise BadModel(f"{config.name} has sliding windows, which {arch} files do not know; take another format")
    if config.rope.scaling not in ("none", "linear", "llama3"):
        raise BadModel(f"rope scaling '{config.rope.scaling}' is not written to GGUF; take another format")
    return arch


def model_fields(config: ModelConfig) -> dict[str, Any]:
    """Everything but the tokenizer."""
    arch = architecture(config)
    fields: dict[str, Any] = {
        "general.name": config.name,
        f"{arch}.vocab_size": config.vocab,
        f"{arch}.context_length": config.context,
        f"{arch}.embedding_length": config.hidden,
        f"{arch}.block_count": config.num_layers,
        f"{arch}.feed_forward_length": config.ffn,
        f"{arch}.attention.head_count": config.heads,
        f"{arch}.attention.head_count_kv": config.kv_heads,
        f"{arch}.attention.key_length": config.head_dim,
        f"{arch}.attention.value_length": config.head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": float(config.norm_eps),
        f"{arch}.rope.dimension_count": config.head_dim,
        f"{arch}.rope.freq_base": float(config.rope.theta),
    }
    if config.rope.scaling == "linear":
        fields |= {f"{arch}.rope.scaling.type": "linear", f"{arch}.rope.scaling.factor": float(config.rope.factor)}
    return fields


def rope_divisors(config: ModelConfig) -> list[float] | None:
    """Of Llama 3.1's frequencies, which a file holds as a tensor."""
    if config.rope.scaling != "llama3":
        return None
    frequencies = (config.rope.theta ** (-2 * i / config.head_dim) for i in range(config.head_dim // 2))
    return [llama3_divisor(frequency, config.rope.factor) for frequency in frequencies]


def tokenizer_fields(folder: Path, vocab: int) -> dict[str, Any]:
    """Without a tokenizer only that there is none, which llama.cpp must be told. Ids without a token are filled up, as
    llama.cpp wants one for each row of the embedding. A way of splitting text that llama.cpp has no name for goes into
    the file as its tokenizer.json: we read that; llama.cpp loads the file without a vocabulary."""
    if not (folder / "tokenizer.json").is_file():
        return {"tokenizer.ggml.model": NO_VOCABULARY}
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    if content.get("model", {}).get("type") != "BPE":
        raise BadModel(f"{folder}: only BPE tokenizers are written to GGUF; take another format")
    numbers = dict(content["model"]["vocab"])
    added = {each["content"]: each for each in content.get("added_tokens", [])}
    numbers |= {text: each["id"] for text, each in added.items()}
    texts = {number: text for text, number in numbers.items()}
    tokens = [texts.get(i, f"[PAD{i}]") for i in range(max(vocab, max(texts) + 1))]
    merges = [each if isinstance(each, str) else " ".join(each) for each in content["model"]["merges"]]
    kinds = [_kind(text, added, i in texts) for i, text in enumerate(tokens)]
    if (unknown := content["model"].get("unk_token")) in numbers:
        kinds[numbers[unknown]] = UNKNOWN
    fields = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}
    own = _pieces(tokens, merges) if content["model"].get("byte_fallback") else _byte_level(content, merges)
    return fields | own | _special(folder, content, numbers)


def _kind(text: str, added: dict[str, Any], is_token: bool) -> int:
    if not is_token:
        return _UNUSED
    if text in added:
        return CONTROL if added[text].get("special") else USER_DEFINED
    return _BYTE if len(text) == 6 and text.startswith("<0x") and text.endswith(">") else _NORMAL


def _byte_level(content: dict[str, Any], merges: list[str]) -> dict[str, Any]:
    pre = content.get("pre_tokenizer") or {}
    parts = pre.get("pretokenizers", [pre])
    regex = next((each["pattern"].get("Regex", "") for each in parts if each.get("type") == "Split"), "")
    ignores = bool(content["model"].get("ignore_merges"))
    names = [name for name, known in SPLITS.items() if known == regex]
    name = next((n for n in names if (n in ("llama-bpe", "llama3")) == ignores), "")
    if not name or not any(each.get("type") == "ByteLevel" for each in parts):
        return {"tokenizer.ggml.model": NO_VOCABULARY, WHOLE: json.dumps(content, ensure_ascii=False)}
    return {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": name, "tokenizer.ggml.merges": merges}


def _pieces(tokens: list[str], merges: list[str]) -> dict[str, Any]:
    """SentencePiece's BPE: a score per token, the first merge the highest."""
    rank = {merge.replace(" ", "", 1): -float(i) for i, merge in reversed(list(enumerate(merges)))}
    scores = [rank.get(text, 0.0) for text in tokens]
    return {"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default", "tokenizer.ggml.scores": scores}


def _special(folder: Path, content: dict[str, Any], numbers: dict[str, int]) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    fields: dict[str, Any] = {}
    for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")):
        text = config.get(name)
        text = text.get("content") if isinstance(text, dict) else text
        if text in numbers:
            fields[f"tokenizer.ggml.{key}_token_id"] = numbers[text]
    fields["tokenizer.ggml.add_bos_token"] = _adds_bos(content)
    normalizers = json.dumps(content.get("normalizer"))
    if content["model"].get("byte_fallback"):
        fields["tokenizer.ggml.add_space_prefix"] = '"Prepend"' in normalizers
    template = folder / "chat_template.jinja"
    chat = template.read_text(encoding="utf-8") if template.is_file() else config.get("chat_template")
    return fields | ({"tokenizer.chat_template": chat} if isinstance(chat, str) else {})


def _adds_bos(content: dict[str, Any]) -> bool:
    """Whether a text gets a special token before it."""
    post = content.get("post_processor") or {}
    for each in post.get("processors", [post]):
        if each.get("type") == "TemplateProcessing":
            return bool(each.get("single")) and "SpecialToken" in each["single"][0]
    return False
