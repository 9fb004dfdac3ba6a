"""The tokenizer of a GGUF file as a tokenizer.json and tokenizer_config.json.

Two kinds: byte-level BPE with merges (model "gpt2"), and SentencePiece's BPE (model "llama"), whose file has scores
instead of merges: any two neighbours that make a token may merge, those with the highest score first.
"""

import json
from collections.abc import Iterator
from typing import Any

from armillary.errors import BadModel
from armillary.store.gguf.gguf_header import GgufHeader

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # types of tokens (llama.h)
NO_VOCABULARY = "none"
_NO_VOCABULARY = (NO_VOCABULARY, "no_vocab")  # llama.cpp reads both
WHOLE = "tokenizer.huggingface.json"
"""the key of a complete tokenizer.json (docs/gguf.md in github.com/ggml-org/ggml)"""
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {"gpt-2": "", "llama-bpe": _WORDS % "{1,3}", "llama3": _WORDS % "{1,3}", "qwen2": _WORDS % ""}
"""how text is split before merges, by tokenizer.ggml.pre; empty: GPT-2's own way"""
_LONGEST_PIECE = 1 << 10
"""characters of a token whose merges are derived: published ones have up to a hundred, and time goes by the square"""
_MOST_MERGES = 1 << 21
"""published vocabularies make up to six hundred thousand"""


def tokenizer_files(header: GgufHeader) -> dict[str, dict[str, Any]]:
    """File name -> content; empty where the file has no tokenizer."""
    kind = _field(header, "model", str)
    if kind is None or (kind in _NO_VOCABULARY and WHOLE not in header.metadata):
        return {}
    tokens: Any = header.metadata.get("tokenizer.ggml.tokens")
    if not _all_of(tokens, str):
        raise BadModel(f"{header.path}: its metadata has no tokenizer.ggml.tokens; fetch the file again")
    if kind in _NO_VOCABULARY:
        return _whole(header, tokens)
    types = _field(header, "token_type", list) or [1] * len(tokens)
    if kind not in ("gpt2", "llama") or len(types) != len(tokens):
        raise BadModel(f"{header.path}: its tokenizer '{kind}' is not supported; gpt2 and llama are")
    content = (_byte_level if kind == "gpt2" else _sentencepiece)(header, tokens)
    content["added_tokens"] = list(_added(tokens, types))
    content |= {"version": "1.0", "truncation": None, "padding": None}
    return {"tokenizer.json": content, "tokenizer_config.json": _config(header, tokens)}


def _field(header: GgufHeader, key: str, kind: type, default: Any = None) -> Any:
    """A value of the tokenizer's metadata; BadModel where it is of another kind."""
    value = header.metadata.get(f"tokenizer.ggml.{key}", default)
    if value is not None and not isinstance(value, kind):
        text = repr(value)[:40]
        raise BadModel(f"{header.path}: tokenizer.ggml.{key} in its metadata is {text}; fetch the file again")
    return value


def _whole(header: GgufHeader, tokens: list[str]) -> dict[str, dict[str, Any]]:
    """The tokenizer.json that the file carries."""
    try:
        content = json.loads(header.metadata.get(WHOLE) or "null")
    except (ValueError, TypeError, RecursionError):
        content = None
    if not isinstance(content, dict):
        return {}
    return {"tokenizer.json": content, "tokenizer_config.json": _config(header, tokens)}


def _all_of(items: Any, kind: type) -> bool:
    return isinstance(items, list) and bool(items) and all(isinstance(item, kind) for item in items)


def _added(tokens: list[str], types: list[int]) -> Iterator[dict[str, Any]]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    for i, (text, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind in (UNKNOWN, CONTROL, USER_DEFINED):
            yield {"id": i, "content": text, "special": kind != USER_DEFINED} | plain


def _bpe(tokens: list[str], merges: list[list[str]], **fields: Any) -> dict[str, Any]:
    empty = dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"))
    flags = {"fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    vocab = {text: i for i, text in enumerate(tokens)}
    return {"type": "BPE"} | empty | flags | {"vocab": vocab, "merges": merges} | fields


def _byte_level(header: GgufHeader, tokens: list[str]) -> dict[str, Any]:
    merges = _field(header, "merges", list)
    pre = _field(header, "pre", str, "gpt-2")
    if not _all_of(merges, str) or not all(merge.count(" ") == 1 for merge in merges):
        raise BadModel(f"{header.path}: its metadata has no tokenizer.ggml.merges; fetch the file again")
    known = set(tokens)
    lacking = (each for each in merges if not known.issuperset((*each.split(" "), each.replace(" ", ""))))
    if (merge := next(lacking, None)) is not None:
        raise BadModel(f"{header.path}: its merge {merge[:40]!r} is not of its tokens; fetch the file again")
    if pre not in SPLITS:
        raise BadModel(f"{header.path}: text split as '{pre}' is not supported; these are: {', '.join(SPLITS)}")
    regex = SPLITS[pre]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": not regex}
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    return {
        "model": _bpe(tokens, [merge.split(" ") for merge in merges], ignore_merges=pre in ("llama-bpe", "llama3")),
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]} if regex else level,
        "post_processor": _template(header, tokens, default=False),
        "decoder": level,
    }


def _sentencepiece(header: GgufHeader, tokens: list[str]) -> dict[str, Any]:
    scores = _field(header, "scores", list)
    if not _all_of(scores, float) or len(scores) != len(tokens):
        raise BadModel(f"{header.path}: its metadata has no tokenizer.ggml.scores; fetch the file again")
    unknown = header.metadata.get("tokenizer.ggml.unknown_token_id", 0)
    prefixed = header.metadata.get("tokenizer.ggml.add_space_prefix", True)
    space = [{"type": "Prepend", "prepend": "▁"}] if prefixed else []
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    back = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        *([{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if space else []),
    ]
    text = tokens[unknown] if type(unknown) is int and 0 <= unknown < len(tokens) else None
    return {
        "model": _bpe(tokens, _merges(header, tokens, scores), unk_token=text, fuse_unk=True, byte_fallback=True),
        "normalizer": {"type": "Sequence", "normalizers": [*space, replace]},
        "pre_tokenizer": None,
        "post_processor": _template(header, tokens, default=True),
        "decoder": {"type": "Sequence", "decoders": back},
    }


def _merges(header: GgufHeader, tokens: list[str], scores: list[float]) -> list[list[str]]:
    """Every pair of tokens that makes a third, the highest score first."""
    number = {text: i for i, text in enumerate(tokens)}
    scored: list[tuple[float, int, int, list[str]]] = []
    for merged, text in enumerate(tokens):
        if len(text) > _LONGEST_PIECE or len(scored) > _MOST_MERGES:
            raise BadModel(f"{header.path}: its tokens are too long or make too many merges; fetch the file again")
        for at in range(1, len(text)):
            left, right = text[:at], text[at:]
            if left in number and right in number:
                scored.append((-scores[merged], number[left], number[right], [left, right]))
    return [merge for *_, merge in sorted(scored)]


def _template(header: GgufHeader, tokens: list[str], *, default: bool) -> dict[str, Any] | None:
    """Adds the begin-of-text token where the file says so."""
    bos = header.metadata.get("tokenizer.ggml.bos_token_id")
    wanted = header.metadata.get("tokenizer.ggml.add_bos_token", default)
    if not wanted or type(bos) is not int or not 0 <= bos < len(tokens):
        return None
    special = {"SpecialToken": {"id": tokens[bos], "type_id": 0}}
    first, second = {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [special, first],
        "pair": [special, first, special, second],
        "special_tokens": {tokens[bos]: {"id": tokens[bos], "ids": [bos], "tokens": [tokens[bos]]}},
    }


def _config(header: GgufHeader, tokens: list[str]) -> dict[str, Any]:
    raw: dict[str, Any] = {}
    for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")):
        number = header.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if type(number) is int and 0 <= number < len(tokens):
            raw[name] = tokens[number]
    template = header.metadata.get("tokenizer.chat_template")
    return raw | ({"chat_template": template} if isinstance(template, str) else {})
